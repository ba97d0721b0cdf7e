"""Whether what drives a model computes what the model's own forward does: random tokens through both, at every load.

Whole, in pieces, after a rollback of all drafted tokens and of some, and as siblings of a tree. The tolerance is far below what one
visible key more or less changes, and that is measured too, on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.errors import ModelError, SkipSearchError, no_numbers
from skipsearch.mask import SkipMask
from skipsearch.models.sight import Sight
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.models.telling import in_short, quietly

TOKENS = 12                         # of each of the two texts
FORK = 7                            # tokens that they share
# Of logits, in their standard deviations: far above what rounding does in float64 and float32. In 16 bits that depends on the depth of
# the model, so half of what one hidden key does there is allowed too, up to MOST.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
MOST = 0.25
WAYS = ("whole", "layer by layer", "in pieces", "after a rollback", "after half a rollback", "with siblings")


class Checked(ModelAdapter, Protocol):
    """What is compared: an adapter that says, for each layer, how many tokens it sees at most, and of which only those of its own chunk."""

    @property
    def spans(self) -> list[tuple[int | None, int | None]]: ...


@dataclass(frozen=True)
class Reference:
    """What the model's own forward says of two texts that fork. tokens: [2, TOKENS]; logits: [2, TOKENS, V].

    states: what goes into each layer of the first text, [1, TOKENS, H]. sights: what its own masks let each layer see; None where the
    modules cannot be looked into, as those of a model that is spread over several GPUs.
    """

    tokens: Tensor
    logits: Tensor
    states: list[Tensor]
    sights: list[Sight] | None


@dataclass(frozen=True)
class Finding:
    """Differences of logits, the largest of a row, in standard deviations. differences: by way; hidden_key: with one key hidden on purpose.

    spans: whether what each layer sees far behind was compared with the model's own masks too.
    """

    differences: dict[str, float]
    hidden_key: float
    tolerance: float
    spans: bool

    def __str__(self) -> str:
        masks = ", and its own masks far behind" if self.spans else ""
        return (f"logits match the model's own forward ({', '.join(self.differences)}{masks}): they differ by at most "
                f"{max(self.differences.values()):.0e} of their standard deviation (limit {self.tolerance:.0e}; "
                f"with one key hidden on purpose {self.hidden_key:.0e})")


@torch.no_grad()
def reference(model: nn.Module, spec: ModelSpec) -> Reference:
    """Asked before anything takes the model apart. Raises: ModelError for a model that cannot be asked, or whose tokens look ahead."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab, (1, TOKENS), generator=generator).repeat(2, 1)
    tokens[1, FORK:] = torch.randint(0, spec.vocab, (TOKENS - FORK,), generator=generator)
    tokens[1, FORK] = (tokens[0, FORK] + 1) % spec.vocab
    tokens = tokens.to(spec.device)
    try:
        with quietly():
            out: Any = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            logits = out.logits
    except Exception as error:   # each family fails in its own way
        raise ModelError(f"the own forward of {spec.id} fails on tokens alone ({in_short(error)}), so nothing can be compared with it; use "
                         "another dtype or model") from None
    if not bool(logits.amax(dim=-1).isfinite().all()):   # the largest of a row with a NaN is NaN
        raise no_numbers()
    ahead = _apart(logits[0, :FORK], logits[1, :FORK]) / (float(logits.float().std()) or 1.0)
    if not ahead <= TOLERANCE[spec.dtype]:
        raise ModelError(f"{spec.id} cannot be driven exactly: its tokens look ahead, since the logits of a token change by {ahead:.2g} of "
                         "their standard deviation with the tokens behind it; use a decoder-only model")
    return Reference(tokens, logits, [h[:1] for h in out.hidden_states or ()], _own_sights(model, spec))


def _own_sights(model: nn.Module, spec: ModelSpec) -> list[Sight] | None:
    from skipsearch.models.prelude import OwnForward  # which imports transformers

    try:
        with quietly():
            return OwnForward(model, spec).sights
    except Exception:   # rows of the table need none of what that asks of a model
        return None


@torch.no_grad()
def compared(model: Checked, known: Reference) -> Finding:
    """Raises: ModelError that names what differs."""
    trial, tolerance = _Trial(model, known), TOLERANCE[model.spec.dtype]
    spread = float(known.logits.float().std()) or 1.0
    hidden_key = _apart(*trial.blind()) / spread
    if tolerance >= TOLERANCE[torch.float16] or model.spec.quantization:
        tolerance = min(max(tolerance, hidden_key / 2), MOST)
    found: dict[str, float] = {}
    for way, run in trial.ways().items():
        try:
            found[way] = _apart(*run()) / spread
        except SkipSearchError:
            raise
        except Exception as error:   # each family fails in its own way
            raise ModelError(f"{model.spec.id} cannot be driven {way} ({in_short(error)}), so it is not decoded here; use another "
                             "model") from None
        if not found[way] <= tolerance:   # also where it is no number
            raise ModelError(f"{model.spec.id} is driven otherwise than its own forward {way}: logits differ by {found[way]:.2g} of their "
                             f"standard deviation, and {tolerance:.2g} is allowed{trial.where(tolerance)}; it is not decoded here")
    _refuse_other_spans(model, known.sights)
    return Finding(found, hidden_key, tolerance, known.sights is not None)


def _refuse_other_spans(model: Checked, own: list[Sight] | None) -> None:
    """Raises: ModelError where a window or a chunk, which may be far wider than the text here, is another one than the model's own."""
    most = model.spec.context or math.inf
    for i, (mine, sight) in enumerate(zip(model.spans, own or (), strict=False)):
        theirs = sight.window, sight.chunk
        if [min(span or most, most) for span in mine] != [min(span or most, most) for span in theirs]:
            raise ModelError(f"{model.spec.id} is driven otherwise than its own forward in what layer {i} sees: a window of {mine[0]} and "
                             f"chunks of {mine[1]}, and its own masks show {theirs[0]} and {theirs[1]}; it is not decoded here")


def _apart(mine: Tensor, theirs: Tensor) -> float:
    """Of two [T, V], the largest difference of a row: its root mean square, which no single rounded logit decides."""
    return float((mine.double() - theirs.double()).square().mean(dim=-1).sqrt().max())


class _Trial:
    """Passes of one model over the reference's tokens. What is compared are rows that see several tokens: the first ones of a text round
    most, and their keys and values are in all others."""

    def __init__(self, model: Checked, known: Reference):
        self.model, self.known = model, known
        self.first, self.second = known.tokens[:1], known.tokens[1:]
        self.room = 2 * TOKENS + 4

    def ways(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        """By name. Recurrent layers know no siblings."""
        ways = dict(zip(WAYS, (self.whole, self.layers, self.pieces, self.rolled_back, self.half, self.siblings), strict=True))
        return {name: way for name, way in ways.items() if way != self.siblings or not self.model.spec.recurrent}

    def whole(self) -> tuple[Tensor, Tensor]:
        cache, planner = self._new()
        return self._pass(self.first, cache, planner.chain(0, TOKENS))[FORK:], self.known.logits[0, FORK:]

    def layers(self) -> tuple[Tensor, Tensor]:
        cache, planner = self._new()
        return self._looped(self.first, cache, planner.chain(0, TOKENS))[FORK:], self.known.logits[0, FORK:]

    def pieces(self) -> tuple[Tensor, Tensor]:
        cache, planner = self._new()
        cuts = (0, 4, 5, TOKENS)
        rows = [self._pass(self.first[:, a:b], cache, planner.chain(a, b - a)) for a, b in pairwise(cuts)]
        return torch.cat(rows)[FORK:], self.known.logits[0, FORK:]

    def rolled_back(self) -> tuple[Tensor, Tensor]:
        """The second text is drafted by half a model and verified, and the first stands in its place after that."""
        cache, planner = self._drafted(FORK)
        return self._pass(self.first[:, FORK:], cache, planner.chain(FORK, TOKENS - FORK)), self.known.logits[0, FORK:]

    def half(self) -> tuple[Tensor, Tensor]:
        """As `rolled_back`, but the texts fork within what is verified, and the first goes on from there in two passes, of which the second
        takes the place of the first one's last row."""
        cache, planner = self._drafted(FORK - 2)
        self._draft(self.first, FORK, cache, planner)
        rows = self._pass(self.first[:, FORK:-2], cache, planner.chain(FORK, TOKENS - FORK - 2))
        last = self._pass(self.first[:, -3:], cache, planner.chain(TOKENS - 3, 3))
        return torch.cat([rows[:-1], last]), self.known.logits[0, FORK:]

    def _drafted(self, start: int) -> tuple[KVCache, Planner]:
        """The second text, from `start` on drafted by half a model and verified."""
        cache, planner = self._new()
        self._pass(self.first[:, :start], cache, planner.chain(0, start))
        self._draft(self.second, start, cache, planner)
        self._pass(self.second[:, start:], cache, planner.chain(start, TOKENS - start))
        return cache, planner

    def _draft(self, text: Tensor, start: int, cache: KVCache, planner: Planner) -> None:
        """Two tokens, by half of each kind of sub-layer; by all but the first layer, since later ones may want something from there."""
        n = self.model.spec.n_layers
        masks = SkipMask(n, attn=tuple(range(n // 2, n)), mlp=tuple(range(0, n, 2))), SkipMask.whole_layers(n, [0])
        for i, mask in enumerate(masks, start):
            self._pass(text[:, i:i + 1], cache, planner.chain(i, 1), mask)

    def siblings(self) -> tuple[Tensor, Tensor]:
        """Both texts as branches of one tree below the last token that they share."""
        cache, planner = self._new()
        self._pass(self.first[:, :FORK - 1], cache, planner.chain(0, FORK - 1))
        branch = TOKENS - FORK
        parents = [parent for i in range(branch) for parent in ((0, 0) if i == 0 else (2 * i - 1, 2 * i))]
        nodes = torch.stack([self.first[0, FORK:], self.second[0, FORK:]], dim=1).flatten()[None]
        rows = self._pass(torch.cat([self.first[:, FORK - 1:FORK], nodes], dim=1), cache, planner.tree(FORK - 1, parents))
        return torch.cat([rows[:1], rows[1::2], rows[2::2]]), torch.cat([self.known.logits[0, FORK - 1:], self.known.logits[1, FORK:]])

    def blind(self) -> tuple[Tensor, Tensor]:
        """As `pieces`, less one key: the last row does not see the token two before it. Recurrent layers cannot be kept from seeing it, so
        there another token stands in its place."""
        cache, planner = self._new()
        if self.model.spec.recurrent:
            other = self.first.clone()
            other[:, -3] = (other[:, -3] + 1) % self.model.spec.vocab
            return self._pass(other, cache, planner.chain(0, TOKENS))[-1:], self.known.logits[0, -1:]
        self._pass(self.first[:, :-1], cache, planner.chain(0, TOKENS - 1))
        plan = planner.chain(TOKENS - 1, 1)
        visible = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool, device=plan.slots.device)
        visible[..., -3] = False
        less = PassPlan(plan.positions, plan.slots, plan.keys, visible, plan.start)
        return self._pass(self.first[:, -1:], cache, less), self.known.logits[0, -1:]

    def where(self, tolerance: float) -> str:
        """The first layer that makes something else of its input, as a part of a sentence."""
        cache, planner = self._new()
        plan = planner.chain(0, TOKENS)
        h = self.model.embed(self.first, plan.positions)
        for i, theirs in enumerate(self.known.states[:self.model.spec.n_layers]):
            if theirs.shape == h.shape and float((h.double() - theirs.double()).abs().max()) > tolerance * float(theirs.float().std()):
                return ", first behind the embedding" if i == 0 else f", first behind layer {i - 1}"
            h = self.model.block(i, theirs if theirs.shape == h.shape else h, cache, plan)
        last = self.model.spec.n_layers - 1
        return f", first behind layer {last} or in the head" if len(self.known.states) > last else ""

    def _new(self) -> tuple[KVCache, Planner]:
        return self.model.new_cache(1, self.room), Planner(self.room, self.model.spec.device)

    def _pass(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None) -> Tensor:
        """Logits [T, V], as an engine would get them."""
        model = self.model
        if model.passes is not None and (logits := model.passes.run(tokens, cache, plan, mask, False)) is not None:
            return logits[0]
        return self._looped(tokens, cache, plan, mask)

    def _looped(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None) -> Tensor:
        model = self.model
        h = model.embed(tokens, plan.positions)
        for i in range(model.spec.n_layers):
            attn, mlp = mask is None or i not in mask.attn, mask is None or i not in mask.mlp
            if attn or mlp:
                h = model.block(i, h, cache, plan, attn=attn, mlp=mlp)
        return model.head(h)[0]
