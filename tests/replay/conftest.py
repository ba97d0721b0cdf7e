from helpers.tiny import lean_engine

__all__ = ["lean_engine"]
