"""Draft with the model itself, without the sub-layers of a mask."""
