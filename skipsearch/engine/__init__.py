"""The engine: the one loop over layers."""

from skipsearch.engine.forward import forward, inference

__all__ = ["forward", "inference"]
