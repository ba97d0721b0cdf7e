"""Prompt lookup: propose the tokens that followed the longest match of the last tokens."""
