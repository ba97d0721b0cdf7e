"""SWIFT: search the mask while decoding."""
