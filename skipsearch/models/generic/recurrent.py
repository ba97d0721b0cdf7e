"""Models with recurrent layers: linear attention, Mamba, short convolutions.

K/V have a slot for each token, and a rejected token is hidden from later passes. A recurrent state
has no slots. It belongs to one position of the text, and tokens cannot be removed from it. The
states before the last full pass are therefore stored. If all tokens of this pass were accepted, the
next full pass continues from the states after it. If some were rejected, the next full pass starts
from the stored states, replays the accepted tokens before its own tokens, and stores the states
between both. A draft pass starts from the same states, and its own states are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelSpec
from skipsearch.models.generic.cache_view import TransformersCacheView, clone_state, state_nbytes
from skipsearch.models.generic.forward_capture import CapturedForward, LayerArgs
from skipsearch.models.generic.generic_adapter import (
    GenericAdapter,
    MaskingInterceptor,
    read_structure,
)
from skipsearch.models.generic.instrument import ForwardCall
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

# Standard deviations of logits. Rounding differs by far less in any dtype, a lost state by far
# more.
FORGET_TOLERANCE = 0.1
# One entry per layer, as in transformers' cache; a layer without a state has an empty entry.
LayerStates = list[Any]


@dataclass(frozen=True)
class StateAt:
    """The states after the first `position` tokens of the text."""

    position: int
    states: LayerStates


@runtime_checkable
class StatefulCache(Protocol):
    """A cache with the states from which a pass continues."""

    def get_state(self, plan: PassPlan, layer: int) -> Any:
        """Return a copy of a layer's state; None if the pass starts at the first token."""


class RecurrentCache(KVCache):
    """A cache with K/V and the token of each slot, and the states of a few positions.

    A pass can start from these states.
    """

    def __init__(self, n_layers: int, batch: int, capacity: int, device: torch.device):
        super().__init__(n_layers, batch, capacity)
        self.tokens = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self._clear_states()

    def _clear_states(self) -> None:
        # Before the first token of the last full pass.
        self.start_state: StateAt | None = None
        # After its last token; None after an earlier slot was overwritten.
        self.end_state: StateAt | None = None
        # After the last draft pass, with its mask.
        self.draft_state: tuple[SkipMask, StateAt] | None = None

    def reset(self) -> None:
        super().reset()
        self._clear_states()

    def resumable_length(self, n_tokens: int) -> int:
        is_resumable = (self.start_state is not None and self.start_state.position <= n_tokens) or (
            self.end_state is not None and self.end_state.position == n_tokens
        )
        return n_tokens if is_resumable else 0

    def get_state(self, plan: PassPlan, layer: int) -> Any:
        start = chain_start(plan)
        stored = (self.start_state, self.end_state)
        state_at = next((s for s in stored if s is not None and s.position == start), None)
        if state_at is None and start:
            raise ModelError(
                "the layers of this model keep a recurrent state, so they run one by one only "
                "where their last pass began or ended"
            )
        return None if state_at is None else clone_state(state_at.states[layer])

    def _set_capacity(self, capacity: int) -> None:
        super()._set_capacity(capacity)
        tokens = self.tokens.new_zeros(self.batch_size, capacity)
        count = min(capacity, self.tokens.shape[1])
        tokens[:, :count] = self.tokens[:, :count]
        self.tokens = tokens

    def copy_from(self, other: KVCache, n_slots: int) -> None:
        super().copy_from(other, n_slots)
        assert isinstance(other, RecurrentCache)
        self.tokens[:, :n_slots] = other.tokens[:, :n_slots]
        self._clear_states()
        # Passes change only clones of the states, so both caches may share them.
        self.start_state, self.end_state = other.start_state, other.end_state

    def begin_pass(self, first_slot: int, mask: SkipMask | None) -> StateAt | None:
        """Return the latest states at or before `first_slot`, which the pass may change.

        Returns None if the pass must start at the first token.
        """
        if (
            mask is not None
            and self.draft_state is not None
            and (self.draft_state[0], self.draft_state[1].position) == (mask, first_slot)
        ):
            (_, draft_state), self.draft_state = self.draft_state, None
            return draft_state
        self.draft_state = None
        if self.end_state is not None and self.end_state.position == first_slot:
            self.start_state, self.end_state = self.end_state, None
        if self.start_state is not None and self.start_state.position > first_slot:
            self.start_state = None
        return (
            None
            if self.start_state is None
            else StateAt(
                self.start_state.position, [clone_state(state) for state in self.start_state.states]
            )
        )

    def end_full_pass(
        self, first_slot: int, start_states: LayerStates | None, end_state: StateAt
    ) -> None:
        """Store the states of a full pass.

        start_states: the states at `first_slot`, if the pass started before it; None: `start_state`
        need not change."""
        if start_states is not None:
            self.start_state = StateAt(first_slot, start_states)
        self.end_state, self.draft_state = end_state, None

    def end_draft_pass(self, first_slot: int, mask: SkipMask, end_state: StateAt) -> None:
        """Store the states of a draft pass."""
        if self.end_state is not None and self.end_state.position > first_slot:
            self.end_state = None  # its slots now hold other tokens
        self.draft_state = mask, end_state

    @property
    def nbytes(self) -> int:
        stored = (self.start_state, self.end_state, self.draft_state and self.draft_state[1])
        states = [state for state_at in stored if state_at for state in state_at.states]
        state_bytes = sum(map(state_nbytes, states))
        return super().nbytes + self.tokens.nbytes + state_bytes


class _StatefulView(TransformersCacheView):
    """A view for a draft pass that first replays `n_replayed` committed tokens.

    The draft must not overwrite their K/V. plan: of all tokens. new_plan: of the tokens after the
    replayed ones.
    """

    def __init__(
        self,
        plan: PassPlan,
        cache: KVCache,
        states: LayerStates,
        new_plan: PassPlan | None = None,
        n_replayed: int = 0,
    ):
        super().__init__(plan, cache, states)
        self.new_plan, self.n_replayed = new_plan or plan, n_replayed

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        return self.cache.write(
            layer_idx,
            key_states[:, :, self.n_replayed :],
            value_states[:, :, self.n_replayed :],
            self.new_plan,
        )


class _ReplayInterceptor(MaskingInterceptor):
    """An interceptor that calls each recurrent part several times, on the tokens between two cuts.

    cuts: tokens at which the next call begins. save_at: the cut at which states are stored in
    `saved_states`, by layer.
    """

    def __init__(
        self,
        model: GenericAdapter,
        plan: PassPlan,
        mask: SkipMask | None,
        states: LayerStates,
        cuts: Sequence[int],
        save_at: int,
    ):
        super().__init__(model, plan, mask)
        self.states, self.save_at, self.n_rows = states, save_at, plan.positions.shape[1]
        self.last_hidden: Tensor | None = None  # output of the last layer
        self.bounds = [*pairwise(sorted({0, *cuts, self.n_rows}))]
        self.saved_states: dict[int, Any] = {}

    def on_layer(
        self, i: int, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        out = super().on_layer(i, call, args, kwargs)
        if i == self.model.spec.n_layers - 1:
            self.last_hidden = out[0] if isinstance(out, tuple) else out
        return out

    def on_part(
        self, i: int, name: str, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if len(self.bounds) == 1 or name not in self.model.parts[i].recurrent:
            return super().on_part(i, name, call, args, kwargs)
        outputs = []
        for begin, end in self.bounds:
            if begin and begin == self.save_at:
                self.saved_states[i] = clone_state(self.states[i])
            outputs.append(
                super().on_part(
                    i, name, call, *self._slice_arguments(args, kwargs, slice(begin, end))
                )
            )
        if isinstance(outputs[-1], tuple):
            return (torch.cat([output[0] for output in outputs], dim=1), *outputs[-1][1:])
        return torch.cat(outputs, dim=1)

    def _slice_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: slice
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._slice_rows(x, rows) for x in args), {
            name: self._slice_rows(x, rows) for name, x in kwargs.items()
        }

    def _slice_rows(self, x: Any, rows: slice) -> Any:
        if isinstance(x, tuple):
            return tuple(self._slice_rows(item, rows) for item in x)
        return (
            x[:, rows]
            if isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[1] == self.n_rows
            else x
        )


class RecurrentAdapter(GenericAdapter):
    """An adapter for a model with recurrent layers.

    Each pass runs the model's own forward, from the latest stored states at or before its start.
    Tokens between these states and the start are replayed.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, tokenizer: Any, forward: CapturedForward):
        super().__init__(model, replace(spec, is_recurrent=True), tokenizer, forward)
        self.row_by_row = False
        self.row_by_row = self._resets_state_on_multirow()

    @torch.no_grad()
    def _resets_state_on_multirow(self) -> bool:
        """Return whether recurrent layers ignore the stored states in a pass over several tokens.

        Some families support such a pass only from an empty state, as in a prefill.
        """
        tokens = torch.arange(5, device=self.spec.device)[None] % self.spec.vocab_size
        device = self.spec.device
        planner, last_logits = Planner(5, device), list[Tensor]()
        for ends in ((3, 5), (3, 4, 5)):
            cache = self.new_cache(1, 5)
            for start, end in pairwise((0, *ends)):
                logits = self.run(
                    tokens[:, start:end], cache, planner.plan_chain(start, end - start), None, True
                )
            last_logits.append(logits.double())
        return not bool(
            (last_logits[0] - last_logits[1]).square().mean().sqrt()
            <= FORGET_TOLERANCE * last_logits[1].std()
        )

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return RecurrentCache(self.spec.n_layers, batch, capacity, self.spec.device)

    def run(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> Tensor:
        """Run a pass, which must be a chain. Raises: ModelError for another plan."""
        return self.run_with_hidden(tokens, cache, plan, mask, last_only)[0]

    def run_with_hidden(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        """Run a pass as `run` does; return (logits, input of the head [B, T, H])."""
        assert isinstance(cache, RecurrentCache)
        start, rows = chain_start(plan), tokens.shape[1]
        cache.reserve(plan.n_keys)
        start_state = cache.begin_pass(start, mask) or StateAt(
            0, self._forward.make_initial_states()
        )
        n_replayed = start - start_state.position
        cache.tokens[:, start : start + rows] = tokens
        all_tokens = cache.tokens[:, start_state.position : start + rows] if n_replayed else tokens
        full_plan = (
            make_chain_plan(cache.tokens, start_state.position, start + rows)
            if n_replayed
            else plan
        )
        is_draft = mask is not None
        single_rows = (
            range(0 if start_state.position else n_replayed, n_replayed + rows)
            if self.row_by_row and start
            else ()
        )
        interceptor = _ReplayInterceptor(
            self,
            full_plan,
            mask,
            start_state.states,
            (0 if is_draft else n_replayed, *single_rows),
            0 if is_draft else n_replayed,
        )
        view = (
            _StatefulView(full_plan, cache, start_state.states, plan, n_replayed)
            if is_draft
            else _StatefulView(full_plan, cache, start_state.states)
        )
        logits = self._forward.run_with(
            interceptor, all_tokens, full_plan.positions, view, last_only
        )
        end_state = StateAt(start + rows, start_state.states)
        if mask is not None:
            cache.end_draft_pass(start, mask, end_state)
        else:
            # Layers without a saved state have none.
            start_states = [
                interceptor.saved_states.get(i, state) for i, state in enumerate(start_state.states)
            ]
            cache.end_full_pass(start, start_states if n_replayed else None, end_state)
        assert interceptor.last_hidden is not None
        hidden = interceptor.last_hidden[:, n_replayed:]
        return (logits if last_only else logits[:, n_replayed:]), hidden

    def with_states(
        self, i: int, layer_args: LayerArgs, cache: KVCache, plan: PassPlan
    ) -> LayerArgs:
        """Return a layer's arguments with its state before the pass.

        A layer loop does not advance states. Raises: ModelError if the cache has no state at the
        start of the pass.
        """
        assert isinstance(cache, StatefulCache)
        states, state = self._forward.make_initial_states(), cache.get_state(plan, i)
        if state is not None:
            states[i] = state
        view = TransformersCacheView(plan, cache, states)
        args, kwargs = layer_args
        return (
            tuple(view if isinstance(x, TransformersCacheView) else x for x in args),
            {
                name: view if isinstance(x, TransformersCacheView) else x
                for name, x in kwargs.items()
            },
        )

    @property
    def description(self) -> str:
        names = sorted({name for parts in self.parts for name in parts.recurrent})
        suffix = ", row by row" if self.row_by_row else ""
        return f"{super().description}, recurrent {', '.join(names)}{suffix}"


def chain_start(plan: PassPlan) -> int:
    """Return the slot of a chain's first token. Raises: ModelError for another plan."""
    if not plan.is_chain or plan.first_slot is None:
        raise ModelError(
            "the layers of this model keep a recurrent state, so a pass is one chain of tokens "
            "after the text, at one place in every row"
        )
    return plan.first_slot


def make_chain_plan(tokens: Tensor, start: int, end: int) -> PassPlan:
    """Return a chain plan as `Planner.plan_chain` does, for a cache with `tokens` [B, capacity]."""
    slots = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1)
    needs_no_mask = start == 0 or end - start == 1
    visible = (
        None
        if needs_no_mask
        else (torch.arange(end, device=tokens.device) <= slots[0, :, None])[None, None]
    )
    return PassPlan(slots, slots, end, visible, start, is_chain=True)


def adapter_from_structure(
    model: nn.Module, spec: ModelSpec, tokenizer: Any = None
) -> GenericAdapter:
    """Return the adapter of a model that is not in the table. Raises: ModelError."""
    forward = read_structure(model, spec)
    return (
        RecurrentAdapter(model, spec, tokenizer, forward)
        if forward.recurrent
        else GenericAdapter(model, spec, tokenizer, forward)
    )
