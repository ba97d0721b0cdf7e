"""ASD: choose the mask from cosines between the input and output of sub-layers."""
