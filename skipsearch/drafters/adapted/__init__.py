"""Draft with a few sub-layers that have trained weights."""
