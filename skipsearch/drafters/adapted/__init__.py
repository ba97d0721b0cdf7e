"""Draft with a few sub-layers that have weights of their own."""
