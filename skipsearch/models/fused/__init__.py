"""Models with weights fused into few matrices: the engine `lean`, and the base of `native`."""
