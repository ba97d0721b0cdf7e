"""When a generation ends, judged token by token: drafting never changes where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipsearch.decoding.arguments import shown
from skipsearch.decoding.sampling import is_whole
from skipsearch.errors import DecodeError
from skipsearch.repeats import RepeatDetector


class TextStream:
    """Turns tokens into text as they come: never half a character, never a piece of what may become a stop string.

    The text depends on the tokens alone, not on how many come between two looks at it. Special tokens show as nothing.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.shown, self.read = 0, 0   # text before token `read` is settled; `shown … read` is context for the detokenizer
        self.context = ""              # text of tokens `shown … read`
        self.held = ""                 # settled, and not taken yet
        self.tail = ""                 # text from token `read` on, which the next token may still change

    def push(self, token: int) -> bool:
        """Whether the text holds a stop string now."""
        self.tokens.append(token)
        self.tail = self._decode(self.shown)[len(self.context):]
        if self.tail and not self.tail.endswith("\ufffd"):
            self.held, self.tail = self.held + self.tail, ""
            self.shown, self.read = self.read, len(self.tokens)
            self.context = self._decode(self.shown)
        return any(s in self.held + self.tail for s in self.stop)

    def take(self, last: bool = False) -> str:
        """What has become certain since the last call. With last=True everything left, cut before the first stop string."""
        if last:
            text, self.held, self.tail = self.held + self.tail, "", ""
            return text[:min((i for s in self.stop if (i := text.find(s)) >= 0), default=len(text))]
        keep = max((n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        text, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return text

    def _decode(self, start: int) -> str:
        return self.tokenizer.decode(self.tokens[start:], skip_special_tokens=True)


def stop_strings(stop: Any, name: str = "stop") -> list[str]:
    """What a request's `stop`, or another setting of that kind, names: one string, several or none. Raises: DecodeError."""
    strings = [stop] if isinstance(stop, str) else [] if stop is None else list(stop) if isinstance(stop, list | tuple | set) else None
    if strings is None or not all(isinstance(s, str) for s in strings):
        raise DecodeError(f"{name} is {shown(stop)}; give a string or a list of strings (a token id to stop at is an eos id)")
    if not all(strings):
        raise DecodeError("a stop string is empty; it would end every generation at once: leave it out")
    return strings


class Stopper:
    """Reasons, in the order they are looked at: "eos", "stop" (a stop string), "repeat" (an n-gram again), "length".

    push(token) -> the reason this token is the last, or None. Stop strings are looked for in the text as it is shown, so they may
    span tokens; one that is itself a special token, which shows as nothing, is looked for by its id.
    text: what is shown of the generation; None without a tokenizer.
    """

    def __init__(self, max_new_tokens: int, eos: Sequence[int] = (), stop: str | Sequence[str] | None = (), tokenizer: Any = None,
                 end_on_repeat: int | None = None):
        stop = stop_strings(stop)
        if stop and tokenizer is None:
            raise DecodeError("stop strings need a tokenizer and this model has none: stop on token ids instead")
        if end_on_repeat is not None and (not is_whole(end_on_repeat) or end_on_repeat < 0):
            raise DecodeError(f"end_on_repeat is {end_on_repeat!r}; it is the length of an n-gram, and 0 turns it off")
        self.max_new_tokens, self.eos, self.n_tokens = max_new_tokens, frozenset(eos), 0
        self.repeats = RepeatDetector(int(end_on_repeat)) if end_on_repeat else None
        special = {t.content: i for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items() if t.special}
        self.stop_ids = {special[s] for s in stop if s in special}
        self.text = None if tokenizer is None else TextStream(tokenizer, [s for s in stop if s not in special])

    def push(self, token: int) -> str | None:
        self.n_tokens += 1
        repeated = self.repeats is not None and self.repeats.push(token)
        stopped = self.text is not None and self.text.push(token)
        if token in self.eos:
            return "eos"
        if stopped or token in self.stop_ids:
            return "stop"
        if repeated:
            return "repeat"
        return "length" if self.n_tokens >= self.max_new_tokens else None
