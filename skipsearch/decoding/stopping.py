"""Stop conditions. Tokens are checked one by one, so drafting does not change the end of a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from time import monotonic
from typing import Any

from skipsearch.decoding.repetition import EndOnRepeat, make_detector
from skipsearch.decoding.validation import short_repr
from skipsearch.engine.sampler import is_integral, is_real
from skipsearch.errors import DecodeError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string
# Most tokens of an unfinished character. A character has at most four bytes, so at most four
# tokens.
MAX_UNSETTLED = 32


class Detokenizer:
    """A detokenizer that turns a stream of tokens into text.

    It never returns an incomplete character, or the beginning of a possible stop string. The text
    depends only on the tokens, not on when it is read. Special tokens have no text, except those of
    `kept_ids`. The work for a token is bounded and does not grow with the text.
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str] = (), kept_ids: Collection[int] = ()
    ):
        self.tokenizer, self.stop_strings = tokenizer, [StopString(s) for s in stop_strings]
        self.kept_ids = frozenset(kept_ids)
        self.tokens: list[int] = []
        # The text before token `settled_end` is settled: it cannot change. Tokens from
        # `context_start` to `settled_end` are decoded again as context for later tokens.
        self.context_start = self.settled_end = 0
        self.context = ""  # text of these context tokens
        self.ready = ""  # settled text that `pop_text` has not returned yet
        self.unsettled = ""  # text from token `settled_end` on, which the next token may change

    def push_token(self, token: int) -> bool:
        """Add a token, and return whether the text now contains a stop string."""
        self.tokens.append(token)
        self.unsettled = self._decode(self.context_start)[len(self.context) :]
        if self.unsettled and not self.unsettled.endswith("\ufffd"):
            self._settle(len(self.tokens))
        elif len(self.tokens) - self.settled_end > MAX_UNSETTLED:
            # These tokens are bytes that form no character, or special tokens.
            self._settle(self._whole_characters())
        return any(s.matched_with(self.unsettled) == len(s.text) for s in self.stop_strings)

    def pop_text(self, last: bool = False) -> str:
        """Return the text that became final since the last call.

        last: return all remaining text, cut before the first stop string.
        """
        if last:
            text, self.ready, self.unsettled = self.ready + self.unsettled, "", ""
            return text[
                : min(
                    (i for s in self.stop_strings if (i := text.find(s.text)) >= 0),
                    default=len(text),
                )
            ]
        certain = len(self.ready) - max((s.matched for s in self.stop_strings), default=0)
        text, self.ready = self.ready[:certain], self.ready[certain:]
        return text

    def _settle(self, end: int) -> None:
        """Append the text of the tokens before `end`, which later tokens cannot change."""
        settled = self._decode(self.context_start, end)[len(self.context) :]
        self.ready, self.unsettled = self.ready + settled, self.unsettled[len(settled) :]
        for s in self.stop_strings:
            s.matched = s.matched_with(settled)
        self.context_start, self.settled_end = self.settled_end, end
        self.context = self._decode(self.context_start, end)

    def _whole_characters(self) -> int:
        """Return the last token boundary, before the last token, that splits no character.

        If each of the last three boundaries splits one, return the number of tokens.
        """
        end = len(self.tokens)
        full_text = self._decode(self.context_start)
        return next(
            (
                i
                for i in range(end - 1, end - 4, -1)
                if self._decode(self.context_start, i) + self._decode(i) == full_text
            ),
            end,
        )

    def _decode(self, start: int, end: int | None = None) -> str:
        return "".join(
            self.tokenizer.decode(list(run), skip_special_tokens=not is_kept)
            for is_kept, run in groupby(self.tokens[start:end], self.kept_ids.__contains__)
        )


class StopString:
    """A search for one string in a growing text, in time proportional to the added text.

    Source: Knuth, Morris & Pratt 1977.
    """

    def __init__(self, text: str):
        self.text = text
        self.matched = 0  # length of the longest prefix of `text` with which the settled text ends
        # borders[i]: length of the longest proper prefix of text[: i + 1] that is also its suffix
        self.borders = [0] * len(text)
        for i in range(1, len(text)):
            self.borders[i] = self._step(self.borders[i - 1], text[i])

    def matched_with(self, added: str) -> int:
        """Return what `matched` would be after the text `added`."""
        matched = self.matched
        for character in added:
            if matched == len(self.text):
                break
            matched = self._step(matched, character)
        return matched

    def _step(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self.borders[matched - 1]
        return matched + (self.text[matched] == character)


def parse_stop_strings(stop: Any, name: str = "stop") -> list[str]:
    """Return the strings of a `stop` setting, which is one string, several or None.

    Raises: DecodeError.
    """
    strings = (
        [stop]
        if isinstance(stop, str)
        else []
        if stop is None
        else list(stop)
        if isinstance(stop, list | tuple | set)
        else None
    )
    if strings is None or not all(isinstance(s, str) for s in strings):
        raise DecodeError(
            f"{name} is {short_repr(stop)}; give a string or a list of strings (a token id to stop "
            "at is an eos id)"
        )
    if not all(strings):
        raise DecodeError(
            "a stop string is empty; it would end every generation at once: leave it out"
        )
    return strings


class StopCondition:
    """The rules that end one generation.

    Reasons, in the order in which they are checked: "eos", "stop" (a stop string), "repeat" (a
    repeated n-gram) or "loop", "length", "time". The caller pushes each emitted token once, and
    pushes no token after `push_token` has returned a reason.

    A stop string is searched in the emitted text, so it may span tokens. A stop string that is a
    special token has no text, and is found by its id. max_seconds: a limit in seconds from the
    creation of this object. It is checked after each token, also within a round. kept_special:
    special tokens that have a text nevertheless."""

    def __init__(
        self,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
        stop: str | Sequence[str] | None = (),
        tokenizer: Any = None,
        end_on_repeat: EndOnRepeat = None,
        max_seconds: float | None = None,
        kept_special: Collection[str] = (),
    ):
        stop = parse_stop_strings(stop)
        _refuse_large(stop)
        if stop and tokenizer is None:
            raise DecodeError(
                "stop strings need a tokenizer and this model has none: stop on token ids instead"
            )
        if end_on_repeat not in (None, "loop") and (
            not is_integral(end_on_repeat) or int(end_on_repeat) < 0
        ):
            raise DecodeError(
                f'end_on_repeat is {end_on_repeat!r}; it is the length of an n-gram or "loop", '
                "and 0 turns it off"
            )
        if max_seconds is not None and (not is_real(max_seconds) or not max_seconds > 0):
            raise DecodeError(
                f"max_seconds is {max_seconds!r}; it is a time above 0, and None sets no limit"
            )
        self.max_new_tokens, self.eos_ids, self.n_tokens = max_new_tokens, frozenset(eos_ids), 0
        self.deadline = None if max_seconds is None else monotonic() + max_seconds
        self.reason: str | None = None  # why the latest token is the last; None: it is not
        self.repeat_detector = make_detector(end_on_repeat)
        special = (
            {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
            if tokenizer is not None and (stop or kept_special)
            else {}
        )
        self.stop_ids = {special[s] for s in stop if s in special}
        self.detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(
                tokenizer,
                [s for s in stop if s not in special],
                [special[s] for s in kept_special if s in special],
            )
        )

    def push_token(self, token: int) -> str | None:
        """Add a token; return the reason if it is the last token, else None."""
        self.n_tokens += 1
        repeated = self.repeat_detector is not None and self.repeat_detector.push_token(token)
        stopped = self.detokenizer is not None and self.detokenizer.push_token(token)
        if token in self.eos_ids:
            self.reason = "eos"
        elif stopped or token in self.stop_ids:
            self.reason = "stop"
        elif repeated:
            assert self.repeat_detector is not None
            self.reason = self.repeat_detector.reason
        elif self.n_tokens >= self.max_new_tokens:
            self.reason = "length"
        elif self.deadline is not None and monotonic() >= self.deadline:
            self.reason = "time"
        return self.reason

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Push tokens in order until one ends the generation; return them up to that one.

        The token that ends the generation is returned, too.
        """
        end = next((i for i, token in enumerate(tokens, 1) if self.push_token(token)), len(tokens))
        return list(tokens[:end])


def _refuse_large(stop: Sequence[str]) -> None:
    """Raise DecodeError if there are too many stop strings, or if one is too long."""
    if len(stop) > MAX_STOP_STRINGS:
        raise DecodeError(
            f"{len(stop):,} stop strings are given, and at most {MAX_STOP_STRINGS} are looked for: "
            "leave some out"
        )
    longest = max(map(len, stop), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise DecodeError(
            f"a stop string has {longest:,} characters, and at most {MAX_STOP_CHARACTERS:,} are "
            "looked for: give "
            "its beginning"
        )
