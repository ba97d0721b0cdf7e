"""Prompt lookup: propose what followed the longest match of the last tokens."""
