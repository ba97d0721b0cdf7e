"""Models whose weights are fused into few matrices: the engine `lean`, and the base of `native`."""
