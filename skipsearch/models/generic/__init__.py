"""Models without a row in the table of families, run by their own forward or layer by layer."""
