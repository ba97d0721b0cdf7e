"""The adapter of a model without a row in the table of families.

A full pass is the model's own forward with our cache and our masks, so it is exact by construction.
A draft pass is this forward with parts switched off. A layer loop runs the layers one by one, with
the arguments that the model's forward passes to them.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ModelError
from skipsearch.models import attention_masks
from skipsearch.models.adapter import ModelSpec, PassRunner
from skipsearch.models.families.unmodified import UnmodifiedModel
from skipsearch.models.generic.attention_pattern import AttentionPattern, reindex_bias
from skipsearch.models.generic.cache_view import TransformersCacheView
from skipsearch.models.generic.forward_capture import (
    CapturedForward,
    LayerArgs,
    bind_arguments,
    hidden_arg,
    replace_hidden,
)
from skipsearch.models.generic.instrument import ForwardCall
from skipsearch.models.kv_cache import KVCache, PassPlan

BIAS_ARGUMENTS = ("alibi", "position_bias")  # arguments of layers with a bias for each key
HEAD_CHUNK_ROWS = 256  # rows of one call of the head
# Channels in which hidden states carry a token id, and the bits in each. bfloat16 has eight
# significant bits. The scale is a power of two, so digits stay exact.
TOKEN_DIGITS, DIGIT_BITS, DIGIT_SCALE = 3, 8, 2.0**-20


class MaskingInterceptor:
    """An interceptor that gives each layer the plan's mask; skipped parts add nothing."""

    def __init__(self, model: GenericAdapter, plan: PassPlan, mask: SkipMask | None = None):
        self.model, self.plan = model, plan
        self.skipped_attn = frozenset(mask.attn if mask else ()) - model.spec.lending_layers
        self.skipped_mlp = frozenset(mask.mlp if mask else ())
        self.masks: dict[AttentionPattern, Tensor] = {}

    def on_layer(
        self, i: int, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if i in self.skipped_attn and i in self.skipped_mlp:
            return self.model.parts[i].wrap_output(hidden_arg(args, kwargs))
        args, kwargs = self.model.with_plan_mask(i, args, kwargs, self)
        return call(*args, **kwargs)

    def on_part(
        self, i: int, name: str, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        parts = self.model.parts[i]
        if (
            i in self.skipped_attn if name in parts.token_mixers else i in self.skipped_mlp
        ) and name in parts.null_outputs:
            return parts.null_outputs[name](args, kwargs)
        return call(*args, **kwargs)

    def get_mask(
        self, pattern: AttentionPattern, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        mask = self.masks.get(pattern)
        if mask is None:
            mask = self.masks[pattern] = pattern.make_mask(self.plan, dtype).to(device)
        return mask


class _LatestGenericPass(threading.local):
    """The inputs of the latest pass of a thread, for a layer loop."""

    plan: PassPlan | None = None
    cache: KVCache | None = None
    interceptor: MaskingInterceptor
    layer_args: list[LayerArgs]
    tokens: Tensor


def read_structure(model: nn.Module, spec: ModelSpec) -> CapturedForward:
    """Read the structure of a model. Raises: ModelError if it cannot be read."""
    if spec.n_devices > 1:
        raise ModelError("it is spread over several GPUs, and only families of the table run so")
    return CapturedForward(model, spec)


class GenericAdapter(UnmodifiedModel, PassRunner):
    """A `ModelAdapter`, and its own `PassRunner`, over any model whose structure can be read.

    The model object is not altered.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        tokenizer: Any = None,
        forward: CapturedForward | None = None,
    ):
        """Read the model, unless its captured `forward` is given. Raises: ModelError."""
        self._forward = forward or read_structure(model, spec)
        # All rows of a batch have the same bias.
        one_bias = any(
            "position_bias" in names for names in self._forward.instrumented.layer_arg_names
        )
        self.model = model
        self.spec = replace(
            spec,
            ragged_batches=not (spec.is_recurrent or one_bias),
            lending_layers=self._forward.lending_layers,
        )
        self.tokenizer = tokenizer
        self.parts, self.attention_patterns = self._forward.parts, self._forward.attention_patterns
        self._latest_pass = _LatestGenericPass()
        self._reads_tokens = self._forward.reads_tokens()

    @property
    def pass_runner(self) -> PassRunner | None:
        return self

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.n_layers, batch, capacity)

    def run(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> Tensor | None:
        return self._forward.run_with(
            MaskingInterceptor(self, plan, mask),
            tokens,
            plan.positions,
            TransformersCacheView(plan, cache),
            last_only,
        )

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        args, kwargs = self._forward.capture_layer_args(tokens, positions, only_first=True)[0]
        hidden = hidden_arg(args, kwargs)
        return attach_tokens(hidden, tokens) if self._reads_tokens else hidden

    def block(
        self,
        i: int,
        h: Tensor,
        cache: KVCache,
        plan: PassPlan,
        *,
        attn: bool = True,
        mlp: bool = True,
    ) -> Tensor:
        latest = self._latest_pass
        is_same_pass = latest.plan is plan and latest.cache is cache
        if self._reads_tokens:
            h, tokens = detach_tokens(h)
            is_same_pass = is_same_pass and torch.equal(tokens, latest.tokens)
        elif not is_same_pass:
            tokens = torch.zeros(h.shape[:2], dtype=torch.long, device=h.device)
        if not is_same_pass:
            latest.layer_args = self._forward.capture_layer_args(
                tokens, plan.positions, plan=plan, cache=cache
            )
            latest.interceptor = MaskingInterceptor(self, plan)
            latest.plan, latest.cache, latest.tokens = plan, cache, tokens
        interceptor = latest.interceptor
        interceptor.skipped_attn = frozenset(() if attn else (i,)) - self.spec.lending_layers
        interceptor.skipped_mlp = frozenset(() if mlp else (i,))
        args, kwargs = replace_hidden(self.with_states(i, latest.layer_args[i], cache, plan), h)
        instrumented = self._forward.instrumented
        out = instrumented.run_with(interceptor, lambda: instrumented.layers[i](*args, **kwargs))
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return attach_tokens(hidden, tokens) if self._reads_tokens else hidden

    def with_states(
        self, i: int, layer_args: LayerArgs, cache: KVCache, plan: PassPlan
    ) -> LayerArgs:
        """Return a layer's arguments for a layer loop, with its recurrent state if it has one."""
        return layer_args

    def head(self, h: Tensor) -> Tensor:
        if self._reads_tokens:
            h, _ = detach_tokens(h)
        return torch.cat(
            [self._forward.head(part) for part in h.split(HEAD_CHUNK_ROWS, dim=1)], dim=1
        )

    def with_plan_mask(
        self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], interceptor: MaskingInterceptor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a layer's arguments with the plan's mask instead of the model's own."""
        names = self._forward.instrumented.layer_arg_names[i]
        plan = interceptor.plan
        pattern = self.attention_patterns[i]
        arguments = bind_arguments(names, args, kwargs)
        if pattern.mask_kind != "none" and not (
            arguments.get("attention_mask") is None and pattern.is_plain_causal(plan)
        ):
            h = hidden_arg(args, kwargs)
            arguments["attention_mask"] = interceptor.get_mask(pattern, h.dtype, h.device)
        if (
            not plan.is_chain
            and arguments.get("position_bias") is not None
            and len(attention_masks.get_key_positions(plan)) > 1
        ):
            raise ModelError(
                f"{self.spec.family} models take one bias for all rows of a batch, so texts of "
                "several lengths cannot go through one pass"
            )
        if not plan.is_chain:
            arguments |= {
                name: reindex_bias(arguments[name], plan)
                for name in BIAS_ARGUMENTS
                if arguments.get(name) is not None
            }
        positional = names[: len(args)]
        return tuple(arguments.pop(name) for name in positional), arguments

    @property
    def attention_spans(self) -> list[tuple[int | None, int | None]]:
        return [(pattern.window, pattern.chunk) for pattern in self.attention_patterns]

    @property
    def description(self) -> str:
        """The structure of the model, in a line."""
        mixers = sorted(
            {name for parts in self.parts for name in parts.token_mixers - parts.recurrent}
        )
        others = sorted(
            {
                name
                for parts in self.parts
                for name in parts.null_outputs
                if name not in parts.token_mixers
            }
        )
        return (
            f"by structure: layers at {self._forward.instrumented.layers_path}, attention "
            f"{', '.join(mixers) or 'none'}, MLP {', '.join(others) or 'none'}"
        )


def attach_tokens(hidden: Tensor, tokens: Tensor) -> Tensor:
    """Return hidden states that carry their tokens, [B, T, H] -> [B, T, H + TOKEN_DIGITS].

    So a layer that reads something made from the tokens can run alone. The digits are so small that
    they change no similarity of hidden states.
    """
    digits = [tokens >> DIGIT_BITS * n & (1 << DIGIT_BITS) - 1 for n in range(TOKEN_DIGITS)]
    return torch.cat([hidden, torch.stack(digits, dim=-1).to(hidden) * DIGIT_SCALE], dim=-1)


def detach_tokens(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return (hidden states [B, T, H], tokens [B, T]) of states that carry their tokens."""
    hidden, scaled = hidden.split([hidden.shape[-1] - TOKEN_DIGITS, TOKEN_DIGITS], dim=-1)
    digits = (scaled / DIGIT_SCALE).long()
    shifts = torch.arange(TOKEN_DIGITS, device=hidden.device) * DIGIT_BITS
    return hidden, (digits << shifts).sum(dim=-1)
