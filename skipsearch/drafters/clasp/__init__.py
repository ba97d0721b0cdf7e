"""CLaSp: choose the mask from hidden states by dynamic programming."""
