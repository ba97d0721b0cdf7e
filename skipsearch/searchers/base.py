"""The searcher port: propose masks (`ask`), learn from judged ones (`tell`). No model is ever seen from here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from skipsearch.mask import SkipMask
from skipsearch.stats import Trial

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Costs:
    """The latency table as searchers see it: seconds of the pieces of a pass.

    sublayers: of each sub-layer at one token, in the flat order of `SkipMask` (attention 0, MLP 0, …).
    overhead: what every pass pays (embedding, head, the loop itself). verify[n]: a full pass over n + 1 tokens.
    """

    sublayers: tuple[float, ...]
    overhead: float
    verify: tuple[float, ...]

    def draft(self, mask: SkipMask) -> float:
        """Seconds of one draft pass under `mask`."""
        return self.overhead + sum(s for s, skipped in zip(self.sublayers, mask.bits, strict=True) if not skipped)


@dataclass(frozen=True)
class Evidence:
    """What was measured about the model before the search; a searcher uses what it needs and says what it lacks.

    cosines: mean cosine of each sub-layer's input and output residual stream (flat order). High: it changes little.
    acceptance_without: α of the draft that skips this one sub-layer alone (flat order).
    states: residual stream before each layer and after the last over calibration text, [L + 1, N, H].
    probe(i, states [M, N, H], attn, mlp) -> [M, N, H]: layer i run on hidden states (CLaSp's programme).
    """

    cosines: tuple[float, ...] | None = None
    acceptance_without: tuple[float, ...] | None = None
    costs: Costs | None = None
    states: Tensor | None = None
    probe: Callable[[int, Tensor, bool, bool], Tensor] | None = None


@dataclass(frozen=True)
class SearchProblem:
    """What a searcher is built from. never_skip: flat sub-layer indices that no proposed mask may skip."""

    n_layers: int
    never_skip: frozenset[int] = frozenset()
    evidence: Evidence = field(default_factory=Evidence)
    seed: int = 0

    @property
    def free(self) -> tuple[int, ...]:
        """Flat indices of the sub-layers that may be skipped, in running order."""
        return tuple(s for s in range(2 * self.n_layers) if s not in self.never_skip)


class Searcher(Protocol):
    """Proposes masks. Deterministic: the same problem, seed and tells give the same asks."""

    def __init__(self, problem: SearchProblem) -> None: ...

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        """A mask worth judging, never one already told or pending; None when there is nothing left to propose."""

    def tell(self, trial: Trial) -> None:
        """Learn from a judged mask, also one that was never asked for."""
