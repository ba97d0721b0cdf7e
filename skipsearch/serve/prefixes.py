"""K/V of earlier requests, for later ones of the same key that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.decoding.prefix import Prefix

WORTH = 16   # tokens; sharing fewer does not pay for overwriting what else a prefix holds


class Prefixes:
    """At most so many that nobody uses, the one used last at the end. The worker alone touches them.

    A prefix belongs to one key for as long as it lives: no request of another key sees its tokens, its K/V, or that it was there.
    """

    def __init__(self, most: int):
        self.most = most
        self._idle: list[tuple[str, Prefix]] = []

    def take(self, key: str, prompt: Sequence[int]) -> Prefix:
        """The one of this key that shares most with the prompt; a new one where none shares enough."""
        own = [prefix for owner, prefix in self._idle if owner == key]
        best = max(own, key=lambda prefix: prefix.shared(prompt), default=None)
        if best is None or best.shared(prompt) < min(WORTH, len(best.tokens)):
            return Prefix()
        self._idle = [(owner, prefix) for owner, prefix in self._idle if prefix is not best]
        return best

    def give_back(self, key: str, prefix: Prefix) -> None:
        """For the next request. The one that was used longest ago makes room, whosever it is."""
        self._idle = [*self._idle, (key, prefix)][-self.most:] if self.most else []
