"""Record an answer: what each round committed, when, and which drafter wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.stopping import Detokenizer


@dataclass(frozen=True)
class Round:
    """A round of a recorded answer.

    at_s: seconds after the first token. drafter: its place in the recipe; None: nothing of its
    draft was accepted. accepted, own: the text of accepted tokens, and of the model's own token.
    """

    at_s: float
    drafter: int | None
    accepted: str
    own: str


@dataclass(frozen=True)
class Recording:
    """An answer of one decoder."""

    tokens: list[int]
    rounds: list[Round]

    @property
    def duration_s(self) -> float:
        return self.rounds[-1].at_s

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / max(self.duration_s, 1e-9)


def record_answer(decoder: Decoder, ids: Sequence[int], options: dict[str, Any]) -> Recording:
    """Decode a prompt and return the recording. options: as for `Decoder.stream`."""
    detokenizer, tokens, rounds = Detokenizer(decoder.model.tokenizer), list[int](), list[Round]()
    chunks, first_at = list[tuple[float, Any]](), None
    for chunk in decoder.stream(ids, trace=True, **options):
        now = perf_counter()
        first_at = now if first_at is None else first_at
        chunks.append((now - first_at, chunk))
    for at_s, chunk in chunks:  # after the answer, so that it does not take its time
        proposal = chunk.proposal
        n_accepted = 0 if proposal is None else proposal.count_accepted(chunk.tokens)
        parts = []
        for part in (chunk.tokens[:n_accepted], chunk.tokens[n_accepted:]):
            for token in part:
                detokenizer.push_token(token)
            parts.append(detokenizer.pop_text())
        rounds.append(Round(at_s, proposal.drafter_index if n_accepted else None, *parts))
        tokens += chunk.tokens
    return Recording(tokens, rounds)
