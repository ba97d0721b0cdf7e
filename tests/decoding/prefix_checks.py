"""Checks of sessions: a request gets the tokens of a new decoder.

Only new tokens go through the prefill, whatever the session has cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from helpers.tiny import VOCAB, FullModel, tiny_llama, tiny_model_and_reference

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, loop
from skipsearch.models import ModelAdapter, adapt

from .checks import DRAFTINGS, PROMPTS, Drafting


@dataclass(frozen=True)
class Turn:
    """A request of a chat.

    keep: tokens of the text so far with which its prompt begins. new: the tokens after them. read:
    tokens of the answer after which the reader leaves; None: it reads to the end. session: its
    index.
    """

    keep: int
    new: tuple[int, ...]
    limit: int
    read: int | None = None
    session: int = 0


TURNS = (
    Turn(0, PROMPTS[2], 14),
    Turn(99, PROMPTS[0], 12),
    Turn(8, (50, 51, 7), 10),
    Turn(0, PROMPTS[2], 14, session=1),
    Turn(99, (1,), 9, read=2),
    Turn(99, (3, 4), 16),
    Turn(12, (), 6),
    Turn(99, (5,), 40, session=1),
    Turn(20, PROMPTS[0] * 40, 8),
    Turn(3, PROMPTS[0], 8),
    Turn(99, (), 1, session=1),
)


def check_prefixes(
    turns: Sequence[Turn] = TURNS,
    drafting: Drafting = DRAFTINGS[0],
    world: tuple[ModelAdapter, FullModel] | None = None,
) -> DecodeStats:
    """Check interleaved chats on one decoder: each answer is the full model's own.

    Only new tokens go through the prefill.
    """
    model, full = world or tiny_model_and_reference()
    decoder = drafting.decoder(model)
    sessions, texts = [decoder.new_session() for _ in range(2)], [[], []]  # type: ignore[var-annotated]
    total, real = DecodeStats(), loop.DecodeLoop._run_full_model
    for turn in turns:
        session, text = sessions[turn.session], texts[turn.session]
        prompt = [*text[: turn.keep], *turn.new][:200] or [2]
        known, first = min(common(prompt, session.cached_ids), len(prompt) - 1), []
        if (
            model.spec.is_recurrent and session.count_shared(prompt) == 0
        ):  # its states are after that
            known = 0
        assert session.count_shared(prompt) == known

        def counting(
            self: loop.DecodeLoop, request: Any, tokens: Any, *rest: Any, **named: Any
        ) -> Any:
            first.append(tokens.shape[1])  # noqa: B023
            return real(self, request, tokens, *rest, **named)

        answer: list[int] = []
        with patch.object(loop.DecodeLoop, "_run_full_model", counting):
            for chunk in (stream := session.stream(prompt, turn.limit)):
                answer += chunk.tokens
                total += chunk.stats or DecodeStats()
                if turn.read is not None and len(answer) >= turn.read:
                    stream.close()  # type: ignore[attr-defined]
                    break
        assert answer == full.greedy(prompt, turn.limit)[: len(answer)], turn
        assert turn.read is not None or len(answer) == turn.limit
        assert first[0] == len(prompt) - known, "what was known needs no pass"
        text[:] = [*prompt, *answer]
        assert session.cached_ids == text[: len(session.cached_ids)], (
            "it stands for this text, and for no more of it"
        )
        assert len(session.cached_ids) < len(text)
    return total


def check_growing() -> None:
    """Check that a session keeps its committed tokens when its cache grows."""
    hf = tiny_llama(layers=2, hidden=16, context=1100)
    model, full = adapt(hf), FullModel(hf)
    session = Decoder(model).new_session()
    prompt = tuple(i * 7 % VOCAB for i in range(200))
    session.generate(prompt, 8)
    held = session.nbytes
    longer = (*prompt, *(i * 5 % VOCAB for i in range(300)))
    again = session.generate(longer, 8)
    assert again.stats.cached_tokens == 200
    assert again.tokens == full.greedy(longer, 8)
    assert session.nbytes == 2 * held


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
