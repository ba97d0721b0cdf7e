"""What the engine native rounds in each pass: inputs of matrices in blocks, and K/V."""

# The largest number of int16 uses 15 bits of 16, as two int8 numbers; float does not round.
ACTIVATIONS = ("int8", "int16", "float")
DEFAULT_ACTIVATIONS = "int8"
# auto: the model's dtype. int8: every 32 numbers of a key or value share a scale.
KV_CACHE_DTYPES = ("auto", "int8")
DEFAULT_KV_CACHE_DTYPE = "auto"
