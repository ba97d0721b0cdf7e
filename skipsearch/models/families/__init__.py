"""Models with a row in the table of families, run by transformers' own modules."""
