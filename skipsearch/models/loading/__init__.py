"""Load a model: find its files, read config and weights, and choose device and quantization."""
