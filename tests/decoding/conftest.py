from helpers.threads import one_thread
from helpers.tiny import lean_engine

__all__ = ["lean_engine", "one_thread"]
