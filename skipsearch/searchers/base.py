"""The searcher port: propose masks (`ask`), learn from judged ones (`tell`). No model is ever seen
from here.

A searcher is built from a `SearchProblem`: how many layers there are, what may be skipped, and what
was measured beforehand, as plain numbers. The driver asks for a mask, judges it, and tells the
trial, until its budget ends or `ask` returns None. This one proposes to skip the first of what may
be skipped, then the first two, and so on (CONTRIBUTING.md goes the whole way):

    class Growing:
        def __init__(self, problem: SearchProblem):
            self.masks = (problem.mask_of(range(count)) for count in range(1, len(problem.units)))
            self.told = set[SkipMask]()

        def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
            return next((mask for mask in self.masks if mask not in pending and mask not in
            self.told), None)

        def tell(self, trial: Trial) -> None:
            self.told.add(trial.mask)   # one that learns also looks at trial.seconds_per_token
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
    """What was measured about the model before the search; a searcher uses what it needs and says
    what it lacks.

    cosines: mean cosine of each sub-layer's input and output residual stream (flat order). High: it
    changes little. single_skip_acceptance: α of the draft that skips this one sub-layer alone (flat
    order). states: residual stream before each layer and after the last over calibration text, [L +
    1, N, H]. probe(i, states [M, N, H], attn, mlp) -> [M, N, H]: layer i run on hidden states
    (CLaSp's programme)."""

    cosines: tuple[float, ...] | None = None
    single_skip_acceptance: tuple[float, ...] | None = None
    costs: Costs | None = None
    states: Tensor | None = None
    probe: Callable[[int, Tensor, bool, bool], Tensor] | None = None


def require(evidence: T | None, name: str, searcher: str) -> T:
    """A piece of evidence that a searcher cannot do without. Raises: SearchError if it was not
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
    """What a searcher is built from.

    never_skip: flat sub-layer indices that no proposed mask may skip. whole_layers: skip a layer's
    attention and MLP only together. Raises: SearchError if an index lies outside the model, nothing
    is left to skip, or evidence is of another model's length."""

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
            ("single_skip_acceptance", self.evidence.single_skip_acceptance),
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
        """Flat indices of the sub-layers that may be skipped, in running order."""
        return tuple(s for s in range(2 * self.n_layers) if s not in self.never_skip)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """What may be skipped independently, in running order: each free sub-layer or, with
        `whole_layers`, each free layer.

        A searcher that counts, ranks and flips units, not sub-layers, honours `never_skip` and
        `whole_layers` for nothing."""
        if not self.whole_layers:
            return tuple((s,) for s in self.skippable)
        return tuple(
            (a, a + 1) for a in range(0, 2 * self.n_layers, 2) if not self.never_skip & {a, a + 1}
        )

    def mask_of(self, units: Iterable[int]) -> SkipMask:
        """The mask that skips these units (indices into `units`)."""
        return SkipMask.from_sublayers(self.n_layers, (s for u in units for s in self.units[u]))

    def units_of(self, mask: SkipMask) -> frozenset[int] | None:
        """The units that a mask skips; None if it skips something that this problem does not allow.

        Raises: SearchError if the mask is of another model.
        """
        if mask.n_layers != self.n_layers:
            raise SearchError(
                f"a mask of {mask.n_layers} layers was told to a search over {self.n_layers}: "
                "another model's?"
            )
        skipped = mask.sublayers
        units = frozenset(u for u, members in enumerate(self.units) if members[0] in skipped)
        return units if self.mask_of(units) == mask else None


class Searcher(Protocol):
    """Proposes masks. Deterministic: the same problem, seed and tells give the same asks, so
    telling again resumes a search.

    The empty mask is never proposed: a draft that skips nothing is no draft, and plain decoding is
    the driver's own candidate. The driver first judges a few masks that need no experience and
    tells them; one that begins with such masks itself says so with `seeds_itself = True`. One that
    asks others says in `proposer` whose its latest mask is."""

    def __init__(self, problem: SearchProblem) -> None: ...

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        """A mask worth judging, never one already told or pending; None when there is nothing left
        to propose.
        """

    def tell(self, trial: Trial) -> None:
        """Learn from a judged mask, also one that was never asked for."""
