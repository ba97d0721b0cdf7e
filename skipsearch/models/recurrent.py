"""Models some of whose layers keep a recurrent state: linear attention, Mamba, short convolutions.

K/V have a slot for each token, and a rejected one is simply not shown again. A state has no slots: it stands at one place of the text,
and tokens cannot be taken out of it. So the states of the place where a full pass begins are kept until the next full pass. Where all of
its tokens stood, that one goes on from the states behind them. Where some fell, it goes on from the states that were kept: the tokens that
stood ride along as its first rows, and the states are kept anew between them and its own rows. A draft begins from the same states, and
its own are thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.errors import ModelError
from skipsearch.mask import SkipMask
from skipsearch.models.own import OwnAdapter, Walk, read
from skipsearch.models.prelude import Given, OwnForward
from skipsearch.models.spec import ModelSpec
from skipsearch.models.structure import Call
from skipsearch.models.view import View, cloned, tensors_of

FORGETFUL = 0.1      # standard deviations of logits: what is right differs far less, in any dtype, and what is not far more
States = list[Any]   # of each layer, as transformers' own cache has it; a layer without a state keeps nothing there


@dataclass(frozen=True)
class Standing:
    """States behind the first `at` tokens of the text."""

    at: int
    states: States


@runtime_checkable
class HoldsStates(Protocol):
    """A cache that knows the states behind which a pass goes."""

    def state(self, plan: PassPlan, layer: int) -> Any:
        """A layer's state, for the caller to change; None: nothing stands before the pass."""


class RecurrentCache(KVCache):
    """K/V by slot, the token of each slot, and the states of the few places from which a pass may go on.

    kept: at the first row of the last full pass. latest: behind its last row, while nothing was written before that. draft: behind the
    last draft pass, and its mask.
    """

    def __init__(self, n_layers: int, batch: int, capacity: int, device: torch.device):
        super().__init__(n_layers, batch, capacity)
        self.tokens = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self._forget()

    def _forget(self) -> None:
        self.kept: Standing | None = None
        self.latest: Standing | None = None
        self.draft: tuple[SkipMask, Standing] | None = None

    def reset(self) -> None:
        super().reset()
        self._forget()

    def usable(self, tokens: int) -> int:
        stands = (self.kept is not None and self.kept.at <= tokens) or (self.latest is not None and self.latest.at == tokens)
        return tokens if stands else 0

    def state(self, plan: PassPlan, layer: int) -> Any:
        start = begins(plan)
        standing = next((s for s in (self.kept, self.latest) if s is not None and s.at == start), None)
        if standing is None and start:
            raise ModelError("the layers of this model keep a recurrent state, so they run one by one only where their last pass began or "
                             "ended")
        return None if standing is None else cloned(standing.states[layer])

    def take_over(self, other: KVCache, count: int) -> None:
        super().take_over(other, count)
        assert isinstance(other, RecurrentCache)
        self.tokens[:, :count] = other.tokens[:, :count]
        self._forget()
        self.kept, self.latest = other.kept, other.latest   # passes change clones of them

    def begin(self, start: int, mask: SkipMask | None) -> Standing | None:
        """The states that a pass at slot `start` goes on from, not behind it, for the pass to change; None: from the first token on."""
        if mask is not None and self.draft is not None and (self.draft[0], self.draft[1].at) == (mask, start):
            (_, drafted), self.draft = self.draft, None
            return drafted
        self.draft = None
        if self.latest is not None and self.latest.at == start:
            self.kept, self.latest = self.latest, None
        if self.kept is not None and self.kept.at > start:
            self.kept = None
        return None if self.kept is None else Standing(self.kept.at, [cloned(state) for state in self.kept.states])

    def passed(self, start: int, kept: States | None, latest: Standing) -> None:
        """A full pass is over. kept: the states at `start`, where they are not those that it went on from."""
        if kept is not None:
            self.kept = Standing(start, kept)
        self.latest, self.draft = latest, None

    def drafted(self, start: int, mask: SkipMask, behind: Standing) -> None:
        """A draft pass is over."""
        if self.latest is not None and self.latest.at > start:
            self.latest = None   # other tokens stand in its slots now
        self.draft = mask, behind

    @property
    def bytes(self) -> int:
        standings = (self.kept, self.latest, self.draft[1] if self.draft else None)
        states = [state for standing in standings if standing is not None for state in standing.states]
        return super().bytes + self.tokens.nbytes + sum(tensor.nbytes for state in states for tensor in tensors_of(state))


class _StatefulView(View):
    """A pass whose first `riding` rows are committed tokens. A draft leaves their K/V as the full model wrote them. plan: of all rows;
    own: of those behind the riding ones."""

    def __init__(self, plan: PassPlan, cache: KVCache, states: States, own: PassPlan | None = None, riding: int = 0):
        super().__init__(plan, cache, states)
        self.own, self.riding = own or plan, riding

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        return self.cache.write(layer_idx, key_states[:, :, self.riding:], value_states[:, :, self.riding:], self.own)


class _Riding(Walk):
    """A step that calls each recurrent part on some rows after the others. cuts: where the next call begins. kept: the states at the first
    cut `keep`, by layer, as far as the step has come."""

    def __init__(self, model: OwnAdapter, plan: PassPlan, mask: SkipMask | None, states: States, cuts: Sequence[int], keep: int):
        super().__init__(model, plan, mask)
        self.states, self.keep, self.rows = states, keep, plan.positions.shape[1]
        self.bounds = [*pairwise(sorted({0, *cuts, self.rows}))]
        self.kept: dict[int, Any] = {}

    def part(self, i: int, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.bounds) == 1 or name not in self.model.parts[i].recurrent:
            return super().part(i, name, call, args, kwargs)
        out = []
        for begin, end in self.bounds:
            if begin and begin == self.keep:
                self.kept[i] = cloned(self.states[i])
            out.append(super().part(i, name, call, *self._some(args, kwargs, slice(begin, end))))
        if isinstance(out[-1], tuple):
            return (torch.cat([one[0] for one in out], dim=1), *out[-1][1:])
        return torch.cat(out, dim=1)

    def _some(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._of(x, rows) for x in args), {name: self._of(x, rows) for name, x in kwargs.items()}

    def _of(self, x: Any, rows: slice) -> Any:
        if isinstance(x, tuple):
            return tuple(self._of(one, rows) for one in x)
        return x[:, rows] if isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[1] == self.rows else x


class RecurrentAdapter(OwnAdapter):
    """A model with recurrent layers, driven by its own forward with the states that belong to each place of the text."""

    def __init__(self, model: nn.Module, spec: ModelSpec, tokenizer: Any, own: OwnForward):
        super().__init__(model, replace(spec, recurrent=True), tokenizer, own)
        self.by_rows = False
        self.by_rows = self._forgets()

    @torch.no_grad()
    def _forgets(self) -> bool:
        """Whether its recurrent parts, given several rows, forget what stood before them: some families prefill from nothing alone."""
        tokens, device = torch.arange(5, device=self.spec.device)[None] % self.spec.vocab, self.spec.device
        planner, last = Planner(5, device), list[Tensor]()
        for ends in ((3, 5), (3, 4, 5)):
            cache = self.new_cache(1, 5)
            for start, end in pairwise((0, *ends)):
                logits = self.run(tokens[:, start:end], cache, planner.chain(start, end - start), None, True)
            last.append(logits.double())
        return not bool((last[0] - last[1]).square().mean().sqrt() <= FORGETFUL * last[1].std())

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return RecurrentCache(self.spec.n_layers, batch, capacity, self.spec.device)

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor:
        """Raises: ModelError for a plan that is no chain."""
        assert isinstance(cache, RecurrentCache)
        start, rows = begins(plan), tokens.shape[1]
        begun = cache.begin(start, mask) or Standing(0, self._own.no_states())
        riding = start - begun.at
        cache.tokens[:, start:start + rows] = tokens
        every = cache.tokens[:, begun.at:start + rows] if riding else tokens
        whole = chain(cache.tokens, begun.at, start + rows) if riding else plan
        draft = mask is not None
        apart = range(0 if begun.at else riding, riding + rows) if self.by_rows and start else ()
        walk = _Riding(self, whole, mask, begun.states, (0 if draft else riding, *apart), 0 if draft else riding)
        view = _StatefulView(whole, cache, begun.states, plan, riding) if draft else _StatefulView(whole, cache, begun.states)
        logits = self._own.during(walk, every, whole.positions, view, last_only)
        behind = Standing(start + rows, begun.states)
        if mask is not None:
            cache.drafted(start, mask, behind)
        else:
            kept = [walk.kept.get(i, state) for i, state in enumerate(begun.states)]   # the others keep nothing
            cache.passed(start, kept if riding else None, behind)
        return logits if last_only else logits[:, riding:]

    def standing(self, i: int, given: Given, cache: KVCache, plan: PassPlan) -> Given:
        """A layer loop leaves the states where they are. Raises: ModelError where none stand there."""
        assert isinstance(cache, HoldsStates)
        states, state = self._own.no_states(), cache.state(plan, i)
        if state is not None:
            states[i] = state
        view = View(plan, cache, states)
        args, kwargs = given
        return (tuple(view if isinstance(x, View) else x for x in args),
                {name: view if isinstance(x, View) else x for name, x in kwargs.items()})

    @property
    def description(self) -> str:
        names = sorted({name for parts in self.parts for name in parts.recurrent})
        return f"{super().description}, recurrent {', '.join(names)}{', row by row' if self.by_rows else ''}"


def begins(plan: PassPlan) -> int:
    """The place of a chain's first token. Raises: ModelError for a plan that is no chain."""
    if not plan.chain or plan.start is None:
        raise ModelError("the layers of this model keep a recurrent state, so a pass is one chain of tokens behind the text, at one place "
                         "in every row")
    return plan.start


def chain(tokens: Tensor, start: int, end: int) -> PassPlan:
    """As `Planner.chain`, for a cache that holds `tokens` [B, capacity]."""
    slots = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1)
    plain = start == 0 or end - start == 1
    visible = None if plain else (torch.arange(end, device=tokens.device) <= slots[0, :, None])[None, None]
    return PassPlan(slots, slots, end, visible, start, chain=True)


def by_structure(model: nn.Module, spec: ModelSpec, tokenizer: Any = None) -> OwnAdapter:
    """The adapter of a model that is read from itself. Raises: ModelError."""
    own = read(model, spec)
    return RecurrentAdapter(model, spec, tokenizer, own) if own.recurrent else OwnAdapter(model, spec, tokenizer, own)
