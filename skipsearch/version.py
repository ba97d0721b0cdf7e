"""The version, in a file of its own: whatever needs it imports no more than this."""

__version__ = "0.2.0"
