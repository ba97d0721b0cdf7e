"""The searcher interface: `ask` proposes a mask, `tell` reports its trial (ask-and-tell, as in
Optuna).

Searchers never access the model. A searcher is built from a `SearchProblem`: the number of layers,
what may be skipped, and what was measured beforehand, as plain numbers. The driver asks for a mask,
judges it and tells the trial, until its budget ends or `ask` returns None. This searcher skips the
first unit, then the first two, and so on (docs/extending.md has the full walkthrough):

    class Growing:
        def __init__(self, problem: SearchProblem):
            self.masks = [problem.mask_of(range(count)) for count in range(1, len(problem.units))]
            self.judged = set[SkipMask]()

        def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
            excluded = {*pending, *self.judged}
            return next((mask for mask in self.masks if mask not in excluded), None)

        def tell(self, trial: Trial) -> None:
            self.judged.add(trial.mask)  # an adaptive one also reads trial.seconds_per_token
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.errors import SearchError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Evidence:
    """The measurements of the model before the search. None: not measured.

    Flat order is that of a pass: attention and MLP of layer 0, of layer 1, …
    cosines: mean cosine between the residual stream before and after each sub-layer (flat order). A
    sub-layer with a high cosine changes the stream little.
    single_skip_acceptance: returns for each sub-layer α of the draft that skips it alone (flat
    order). The first call measures it.
    costs: the cost model.
    states: residual stream over calibration text before each layer and after the last, [L + 1, N,
    H].
    probe: probe(i, states [M, N, H], attn, mlp) -> [M, N, H] runs layer i on hidden states (for
    CLaSp's dynamic program).
    """

    cosines: tuple[float, ...] | None = None
    single_skip_acceptance: Callable[[], tuple[float, ...]] | None = None
    costs: Costs | None = None
    states: Tensor | None = None
    probe: Callable[[int, Tensor, bool, bool], Tensor] | None = None


def require(evidence: T | None, name: str, searcher: str) -> T:
    """Return `evidence`, which a searcher needs.

    name: its field in `Evidence`, for the error message. Raises: SearchError if it was not
    measured.
    """
    if evidence is None:
        raise SearchError(
            f"searcher {searcher!r} needs evidence.{name}; measure it before the search, or take "
            "another searcher"
        )
    return evidence


@dataclass(frozen=True)
class SearchProblem:
    """The problem that a searcher solves: a model, and the sub-layers that may be skipped.

    never_skip: flat sub-layer indices that no proposed mask may skip.
    whole_layers: skip attention and MLP of a layer only together.

    Raises: SearchError if an index lies outside the model, nothing is left to skip, or evidence has
        the length of another model.
    """

    n_layers: int
    never_skip: frozenset[int] = frozenset()
    evidence: Evidence = field(default_factory=Evidence)
    seed: int = 0
    whole_layers: bool = False

    def __post_init__(self) -> None:
        n = 2 * self.n_layers
        for s in sorted(self.never_skip):
            if not 0 <= s < n:
                raise SearchError(
                    f"never_skip names sub-layer {s}, outside 0..{n - 1} of a model of "
                    f"{self.n_layers} layers"
                )
        if not self.units:
            raise SearchError(
                "never_skip leaves nothing to skip; take at least one sub-layer (or whole layer) "
                "off that list"
            )
        if self.seed < 0:
            raise SearchError(f"seed is {self.seed}; a seed is a whole number from 0 up")
        costs = self.evidence.costs
        for name, values in (
            ("cosines", self.evidence.cosines),
            ("costs.sublayers", costs.sublayers if costs else None),
        ):
            if values is not None and len(values) != n:
                raise SearchError(
                    f"evidence.{name} has {len(values)} values for {n} sub-layers; is it another "
                    "model's?"
                )
        if costs and len(costs.verify) < 2:
            raise SearchError(
                f"evidence.costs.verify has {len(costs.verify)} passes; measure those over one and "
                "two tokens"
            )

    @property
    def skippable(self) -> tuple[int, ...]:
        """Flat indices of the sub-layers that may be skipped, in the order of a pass."""
        return tuple(s for s in range(2 * self.n_layers) if s not in self.never_skip)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The units that may be skipped independently, in the order of a pass.

        A unit is a sub-layer or, with `whole_layers`, a layer. A searcher that works in units
        respects `never_skip` and `whole_layers` without code of its own.
        """
        if not self.whole_layers:
            return tuple((s,) for s in self.skippable)
        return tuple(
            (a, a + 1) for a in range(0, 2 * self.n_layers, 2) if not self.never_skip & {a, a + 1}
        )

    def mask_of(self, units: Iterable[int]) -> SkipMask:
        """Return the mask that skips these units (indices into `units`)."""
        return SkipMask.from_sublayers(self.n_layers, (s for u in units for s in self.units[u]))

    def units_of(self, mask: SkipMask) -> frozenset[int] | None:
        """Return the units that a mask skips; None if the problem does not allow the mask.

        Raises: SearchError if the mask is of another model.
        """
        if mask.n_layers != self.n_layers:
            raise SearchError(
                f"a mask of {mask.n_layers} layers was told to a search over {self.n_layers}: is "
                "it another model's?"
            )
        skipped = mask.sublayers
        units = frozenset(u for u, members in enumerate(self.units) if members[0] in skipped)
        return units if self.mask_of(units) == mask else None


class Searcher(Protocol):
    """A searcher, which proposes masks.

    A searcher is deterministic: the same problem, seed and trials give the same proposals. A search
    is therefore resumed by telling the trials again.
    A searcher never proposes the empty mask. If drafts that read less may pay with nothing skipped,
    the search judges the empty mask itself and tells the trial.
    seeds_itself: the driver first judges a few masks of non-adaptive searchers and tells them. A
    searcher that begins with such masks itself sets this to True.
    proposer: a searcher that delegates to others sets this to the name of the searcher whose mask
    it returned last.
    """

    def __init__(self, problem: SearchProblem) -> None: ...

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        """Return a mask to judge; None if there is nothing left to propose.

        The mask is neither judged nor pending. Asking changes nothing: the same call returns the
        same mask until the next `tell`.
        """

    def tell(self, trial: Trial) -> None:
        """Learn from a judged mask. It may be one that another searcher proposed."""
