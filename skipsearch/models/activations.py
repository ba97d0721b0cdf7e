"""How the engine native rounds the inputs of matrices whose weights are in blocks."""

# The largest number of int16 uses 15 bits of 16, as two int8 numbers; float does not round.
ACTIVATIONS = ("int8", "int16", "float")
DEFAULT_ACTIVATIONS = "int8"
