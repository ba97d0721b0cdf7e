"""The sources of rows, one file for each kind."""
