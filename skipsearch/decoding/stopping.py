"""When a generation ends, judged token by token: drafting never changes where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipsearch.errors import DecodeError
from skipsearch.repeats import RepeatDetector


class Stopper:
    """Reasons, in the order they are looked at: "eos", "stop" (a stop string), "repeat" (an n-gram again), "length".

    push(token) -> the reason this token is the last, or None. Stop strings are looked for in the decoded text, so they may span tokens.
    """

    def __init__(self, max_new_tokens: int, eos: Sequence[int] = (), stop: Sequence[str] = (), tokenizer: Any = None,
                 end_on_repeat: int | None = None):
        if stop and tokenizer is None:
            raise DecodeError("stop strings need a tokenizer and this model has none: stop on token ids instead")
        if any(not s for s in stop):
            raise DecodeError("a stop string is empty; it would end every generation at once")
        self.max_new_tokens, self.eos, self.stop, self.tokenizer = max_new_tokens, frozenset(eos), tuple(stop), tokenizer
        self.repeats = RepeatDetector(end_on_repeat) if end_on_repeat else None
        self.tokens: list[int] = []
        # A token is at least one byte of text, so this many tokens hold any stop string, with room for a cut character.
        self._window = max((len(s.encode()) for s in stop), default=0) + 8

    def push(self, token: int) -> str | None:
        self.tokens.append(token)
        repeated = self.repeats is not None and self.repeats.push(token)
        if token in self.eos:
            return "eos"
        if self.stop and any(s in self.tokenizer.decode(self.tokens[-self._window:]) for s in self.stop):
            return "stop"
        if repeated:
            return "repeat"
        return "length" if len(self.tokens) >= self.max_new_tokens else None


class TextStream:
    """Turns tokens into text as they come: never half a character, never a piece of what may become a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.shown, self.read = 0, 0   # text before token `shown` is out; `shown … read` is context for the detokenizer
        self.held = ""

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens make certain. With last=True everything left, cut before the first stop string."""
        self.tokens.extend(tokens)
        before = self._decode(self.shown, self.read)
        after = self._decode(self.shown, len(self.tokens))
        if not after.endswith("\ufffd") or last:
            self.held += after[len(before):]
            self.shown, self.read = self.read, len(self.tokens)
        cut = min((i for s in self.stop if (i := self.held.find(s)) >= 0), default=None)
        if cut is not None:
            text, self.held = self.held[:cut], ""
            return text
        keep = 0 if last else max((n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        text, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return text

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self.tokens[start:end], skip_special_tokens=True)
