"""The adapter of a model that the table of families does not know: its own `forward` with our cache and our visibility.

A full pass is the model's own forward, so it is exact by construction. A draft pass is the same with parts switched off. The layer loop of
the port runs its layers one by one, with the arguments that its forward hands them.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.errors import ModelError
from skipsearch.mask import SkipMask
from skipsearch.models import masks
from skipsearch.models.prelude import Given, OwnForward, hidden, named, with_hidden
from skipsearch.models.sight import Sight, by_position
from skipsearch.models.spec import ModelSpec, PassRunner, Scored, Scorer
from skipsearch.models.structure import Call
from skipsearch.models.view import View
from skipsearch.models.weighed import Weighed

BIASES = ("alibi", "position_bias")   # arguments of layers that hold a bias for each key
ROWS = 256                            # that go into the head at once


class Walk:
    """A step over a plan: each layer sees what the plan shows, and parts that are off return nothing to add."""

    def __init__(self, model: OwnAdapter, plan: PassPlan, mask: SkipMask | None = None):
        self.model, self.plan = model, plan
        self.no_attn, self.no_mlp = frozenset(mask.attn if mask else ()), frozenset(mask.mlp if mask else ())
        self.masks: dict[Sight, Tensor] = {}

    def layer(self, i: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if i in self.no_attn and i in self.no_mlp:
            return self.model.parts[i].returned(hidden(args, kwargs))
        args, kwargs = self.model.seeing(i, args, kwargs, self)
        return call(*args, **kwargs)

    def part(self, i: int, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self.model.parts[i]
        if (i in self.no_attn if name in parts.mixers else i in self.no_mlp) and name in parts.off:
            return parts.off[name](args, kwargs)
        return call(*args, **kwargs)

    def mask(self, sight: Sight, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = self.masks.get(sight)
        if found is None:
            found = self.masks[sight] = sight.mask(self.plan, dtype).to(device)
        return found


class _Latest(threading.local):
    """The pass that this thread is in, for the port's layer loop."""

    plan: PassPlan | None = None
    cache: KVCache | None = None
    walk: Walk
    calls: list[Given]


def read(model: nn.Module, spec: ModelSpec) -> OwnForward:
    """Raises: ModelError for a model that is not built of such layers."""
    if spec.n_devices > 1:
        raise ModelError("it is spread over several GPUs, and only families of the table are driven so")
    return OwnForward(model, spec)


class OwnAdapter(Weighed):
    """A `ModelAdapter` and its own `PassRunner`, over any model whose structure can be read. The model object is not altered."""

    run_layers = None

    def __init__(self, model: nn.Module, spec: ModelSpec, tokenizer: Any = None, own: OwnForward | None = None):
        """own: the model as it was read already. Raises: ModelError for a model whose layers need more than the states before them."""
        self._own = own or read(model, spec)
        one_bias = any("position_bias" in names for names in self._own.skeleton.arguments)   # for all rows of a batch
        self.model, self.spec, self.tokenizer = model, replace(spec, together=not (spec.recurrent or one_bias)), tokenizer
        self.parts, self.sights = self._own.parts, self._own.sights
        self._latest = _Latest()
        self._own.refuse_other_inputs()

    @property
    def passes(self) -> PassRunner | None:
        return self

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.n_layers, batch, capacity)

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor | None:
        return self._own.during(Walk(self, plan, mask), tokens, plan.positions, View(plan, cache), last_only)

    def run_scored(self, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer, confidence: bool) -> Scored | None:
        return None

    def run_draft(self, token: Tensor, cache: KVCache, planner: Planner, mask: SkipMask, scorer: Scorer, most: int,
                  threshold: float) -> Scored | None:
        return None

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return hidden(*self._own.captured(tokens, positions, only_first=True)[0])

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        latest = self._latest
        if latest.plan is not plan or latest.cache is not cache:
            tokens = torch.zeros(h.shape[:2], dtype=torch.long, device=h.device)
            latest.calls = self._own.captured(tokens, plan.positions, plan=plan, cache=cache)
            latest.walk = Walk(self, plan)
            latest.plan, latest.cache = plan, cache
        walk = latest.walk
        walk.no_attn, walk.no_mlp = frozenset(() if attn else (i,)), frozenset(() if mlp else (i,))
        args, kwargs = with_hidden(self.standing(i, latest.calls[i], cache, plan), h)
        skeleton = self._own.skeleton
        out = skeleton.during(walk, lambda: skeleton.layers[i](*args, **kwargs))
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states

    def standing(self, i: int, given: Given, cache: KVCache, plan: PassPlan) -> Given:
        """A layer's arguments in a layer loop, with what it keeps of the text before the pass beside its K/V."""
        return given

    def head(self, h: Tensor) -> Tensor:
        return torch.cat([self._own.head(part) for part in h.split(ROWS, dim=1)], dim=1)

    def seeing(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], walk: Walk) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's arguments with what the plan shows it in the place of what its own forward would."""
        names, plan, sight = self._own.skeleton.arguments[i], walk.plan, self.sights[i]
        given = named(names, args, kwargs)
        if sight.form != "none" and not (given.get("attention_mask") is None and sight.all_of(plan)):
            h = hidden(args, kwargs)
            given["attention_mask"] = walk.mask(sight, h.dtype, h.device)
        if not plan.chain and given.get("position_bias") is not None and len(masks.key_positions(plan)) > 1:
            raise ModelError(f"{self.spec.family} models take one bias for all rows of a batch, so texts of several lengths cannot go "
                             "through one pass")
        if not plan.chain:
            given |= {name: by_position(given[name], plan) for name in BIASES if given.get(name) is not None}
        positional = names[:len(args)]
        return tuple(given.pop(name) for name in positional), given

    @property
    def spans(self) -> list[tuple[int | None, int | None]]:
        return [(sight.window, sight.chunk) for sight in self.sights]

    @property
    def description(self) -> str:
        """What the model was read as, in a line."""
        mixers = sorted({name for parts in self.parts for name in parts.mixers - parts.recurrent})
        others = sorted({name for parts in self.parts for name in parts.off if name not in parts.mixers})
        return (f"by structure: layers at {self._own.skeleton.path}, attention {', '.join(mixers) or 'none'}, MLP "
                f"{', '.join(others) or 'none'}")
