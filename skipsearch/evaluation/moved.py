"""How a drafter's masks moved over one generation: which it drafted under in each round, and what was accepted there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipsearch.decoding import Decoder
from skipsearch.drafters.choosing import ChoosingDrafter, ChoosingSession
from skipsearch.evaluation.prompts import Workload
from skipsearch.models.spec import ModelAdapter
from skipsearch.recipe import Recipe

SHOWN = 8   # prompts that are decoded one after another, so that a search has its stream; the one under which masks moved most is kept


@dataclass(frozen=True)
class Moved:
    """drafter: its place in the recipe, from 0. masks: (the round from which it was in force, its bits), bits in the flat order of
    `SkipMask`. rounds: (drafter, drafted tokens, accepted ones) of each; drafter -1 where nobody drafted."""

    drafter: int
    masks: tuple[tuple[int, tuple[int, ...]], ...]
    rounds: tuple[tuple[int, int, int], ...]


class _Noting:
    """Around a drafter that chooses: keeps the session of the latest request."""

    def __init__(self, inner: ChoosingDrafter):
        self.inner = inner
        self.latest: ChoosingSession | None = None

    def watch(self) -> Any:
        self.latest = self.inner.watch()  # type: ignore[assignment]
        return self.latest


def moved(model: ModelAdapter, recipe: Recipe, work: Workload) -> Moved | None:
    """Of the first prompts the one under which the masks moved most, and of equals the longest; None for a recipe whose masks stay."""
    place = next((i for i, spec in enumerate(recipe.drafters) if spec.moves), None)
    if place is None:
        return None
    decoder = Decoder(model, recipe)
    length, inner = decoder.loop.drafters[place]
    noting = _Noting(inner)  # type: ignore[arg-type]
    decoder.loop.drafters[place] = (length, noting)  # type: ignore[assignment]
    found = []
    for p in range(min(SHOWN, len(work.prompts))):
        rounds = []
        _, *chunks = decoder.stream(work.prompts[p], work.max_new_tokens, trace=True, seed=p, temperature=work.sampling.temperature,
                                    top_p=work.sampling.top_p, top_k=work.sampling.top_k, end_on_repeat=work.end_on_repeat)
        for chunk in chunks:
            proposal = chunk.proposal
            rounds.append((-1, 0, 0) if proposal is None else
                          (proposal.drafter, len(proposal.tokens), proposal.accepted(chunk.tokens)))
        assert noting.latest is not None
        found.append(Moved(place, tuple((at, mask.bits) for at, mask in noting.latest.masks if at < max(1, len(rounds))), tuple(rounds)))
    return max(found, key=lambda one: (len(one.masks), len(one.rounds)))
