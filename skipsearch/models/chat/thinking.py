"""Thinking: the text between two marks before an answer, which is no part of the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.core.constraint import Constraint, ConstraintAfterThinking

MAX_MARK_TOKENS = 32  # at the end of a prompt, white space after the mark included


@dataclass(frozen=True)
class ThinkingFormat:
    """The marks of one form of thinking.

    between: after the end of the thinking, before more thinking or the answer. head: before an
    answer that is no call of a tool.
    """

    begin: str
    end: str
    between: str = ""
    head: str = ""

    @property
    def marks(self) -> tuple[str, str]:
        """Both marks."""
        return self.begin, self.end


THINKING_FORMATS = (
    ThinkingFormat("<think>", "</think>"),  # Qwen3, DeepSeek-R1, GLM-4.5, SmolLM3
    ThinkingFormat("[THINK]", "[/THINK]"),  # Magistral
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThinkingFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingFormat("<thought>", "</thought>"),  # EXAONE Deep
    ThinkingFormat(  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final<|message|>",
    ),
)


@dataclass(frozen=True)
class ThinkingStart:
    """How thinking begins in the answer to one prompt.

    is_open: the prompt ends inside the thinking, so the answer has no mark of its beginning.
    is_over: the prompt ends after it.
    """

    form: ThinkingFormat
    is_open: bool = False
    is_over: bool = False

    def delay(self, constraint: Constraint, may_call: bool = False) -> Constraint:
        """Return the constraint of the whole text whose answer has the given one.

        may_call: the constraint has the marks of calls of tools.
        """
        if self.is_over:
            return constraint
        form = self.form
        return ConstraintAfterThinking(
            **{constraint.kind: getattr(constraint, constraint.kind)},
            begin=None if self.is_open else form.begin,
            end=form.end,
            between=form.between,
            head="" if may_call else form.head,
        )


def detect_thinking(
    tokenizer: Any, template: str, prompt_ids: Sequence[int], continued_text: str | None = None
) -> ThinkingStart | None:
    """Return how the answer to a prompt begins; None if the model has no marks of thinking.

    The marks are in the chat template, or are tokens of their own. continued_text: of the message
    that the answer continues, which may have ended inside its thinking.
    """
    own_tokens = tokenizer.get_added_vocab()
    form = next(
        (
            form
            for form in THINKING_FORMATS  # other models have the end of gpt-oss, too
            if (
                form.begin in template
                if form.head
                else form.end in template or form.end in own_tokens
            )
        ),
        None,
    )
    if form is None:
        return None
    if continued_text:
        is_open = form.begin in continued_text and form.end not in continued_text
        return ThinkingStart(form, is_open, not is_open)
    prompt_end = str(tokenizer.decode(prompt_ids[-MAX_MARK_TOKENS:])).rstrip()
    return ThinkingStart(form, prompt_end.endswith(form.begin), prompt_end.endswith(form.end))


class ThinkingReader:
    """Separates the thinking from the answer, while both grow.

    Thinking begins only where the answer begins, so an answer may speak of the marks. In a form
    with a text `between`, more thinking may follow. White space next to the marks is dropped.
    """

    def __init__(self, start: ThinkingStart):
        self._form = start.form
        self._buffer = ""  # text that is neither thinking nor answer yet
        self._may_begin = True  # a mark of the beginning may still follow
        self._drop_space = start.is_open  # nothing but white space since the last mark
        self.is_thinking = start.is_open
        self.has_thought = start.is_open
        self._n_ended = 0  # times that the thinking has ended

    @property
    def may_think(self) -> bool:
        """Whether further text may be thinking."""
        return self._may_begin or self.is_thinking

    def count_tokens(self, tokenizer: Any, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens of a text are thinking, marks included.

        tokens: of the text so far, or up to any token after the thinking.
        """
        if self.is_thinking or not self.has_thought:
            return len(tokens) * self.is_thinking
        end, n_ended = self._form.end, self._n_ended
        return bisect_left(
            range(len(tokens)),
            True,
            key=lambda n: tokenizer.decode(tokens[:n]).count(end) >= n_ended,
        )

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """Read more of the text; return what it adds to the thinking and to the answer.

        last: the text ends here.
        """
        self._buffer += text
        thought = ""
        while self.may_think:
            if not self._may_begin:
                thought += self._read_thought(last)
                if self.is_thinking:
                    return thought, ""
            elif not self._read_begin(last):
                return thought, ""
            elif self.is_thinking and self._n_ended:
                thought += "\n"
        return thought, self._take(len(self._buffer))

    def _read_begin(self, last: bool) -> bool:
        """Move past the mark of the beginning. Returns False if it may still be incomplete."""
        text, begin = self._buffer.lstrip(), self._form.begin
        begin = self._form.between + begin if self._n_ended else begin
        if not last and len(text) < len(begin) and begin.startswith(text):
            return False
        self._may_begin = False
        if text.startswith(begin):
            self._buffer = text[len(begin) :]
            self.is_thinking = self.has_thought = self._drop_space = True
        return True

    def _read_thought(self, last: bool) -> str:
        """Move thinking from the buffer, up to its end."""
        thought, mark, rest = self._buffer.partition(self._form.end)
        if mark:
            self._buffer = thought.rstrip()
            thought = self._take(len(self._buffer))
            self._buffer, self.is_thinking, self._drop_space = rest, False, True
            self._n_ended += 1
            self._may_begin = bool(self._form.between)
            return thought
        if last:
            return self._take(len(thought.rstrip()))
        end = self._form.end
        n_held = next(n for n in range(len(end), -1, -1) if thought.endswith(end[:n]))
        return self._take(len(thought[: len(thought) - n_held].rstrip()))

    def _take(self, n_characters: int) -> str:
        """Take text from the buffer, without white space after a mark."""
        text, self._buffer = self._buffer[:n_characters], self._buffer[n_characters:]
        if self._drop_space:
            text = text.lstrip()
            self._drop_space = not text
        return text
