"""Record the reference output of a model, from its own forward or from a checked engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipsearch.errors import ForeignForward, ModelError, non_finite_logits
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.models.generic.attention_pattern import AttentionPattern
from skipsearch.models.kv_cache import Planner
from skipsearch.models.third_party import first_line_of, silence_transformers

TEXT_TOKENS = 12  # tokens of each of the two texts
FORK_AT = 7  # tokens that the two texts share
# Allowed difference in standard deviations of the logits, far above the rounding of float64 and
# float32. In 16 bits, rounding depends on the depth of the model, so half of the effect of one
# hidden key is also allowed, and the effect of rounding each layer otherwise, both up to
# `check.MAX_TOLERANCE`.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


@dataclass(frozen=True)
class ReferenceOutput:
    """The reference output for two texts with a common beginning."""

    tokens: Tensor  # [2, TEXT_TOKENS]
    logits: Tensor  # [2, TEXT_TOKENS, V]
    # Attention patterns of the layers, from the model's own masks; None if they cannot be read.
    attention_patterns: list[AttentionPattern] | None
    engine: str | None = None  # the engine that computed it; None: the model's own forward


@torch.no_grad()
def record_reference(model: nn.Module, spec: ModelSpec) -> ReferenceOutput:
    """Run the model's own forward, before the model is fused.

    Raises: ModelError if the forward fails, if logits are NaN, or if tokens attend to later
    tokens.
    """
    tokens = _texts(spec)
    try:
        with silence_transformers():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # each family fails in its own way
        raise ModelError(
            f"the own forward of {spec.id} fails on tokens alone ({first_line_of(error)}), so "
            "nothing can be compared with it; use "
            "another dtype or model"
        ) from None
    if not bool(logits.amax(dim=-1).isfinite().all()):  # the maximum of a row with a NaN is NaN
        raise non_finite_logits()
    logit_std = float(logits.float().std()) or 1.0
    ahead = max_row_rmse(logits[0, :FORK_AT], logits[1, :FORK_AT]) / logit_std
    if not ahead <= TOLERANCE[spec.dtype]:
        raise ForeignForward(
            f"{spec.id} cannot be driven exactly: its tokens look ahead, since the logits of a "
            f"token change by {ahead:.2g} of their standard deviation with the tokens after it; "
            "use a decoder-only model"
        )
    return ReferenceOutput(tokens, logits, _record_patterns(model, spec))


@torch.no_grad()
def record_reference_from(model: ModelAdapter) -> ReferenceOutput:
    """Run an adapter layer by layer, as the reference for an engine that is built on it.

    Raises: ModelError if logits are NaN.
    """
    tokens = _texts(model.spec)
    plan = Planner(TEXT_TOKENS, model.spec.device).plan_chain(0, TEXT_TOKENS)
    caches = [model.new_cache(1, TEXT_TOKENS) for _ in tokens]
    hidden = [model.embed(text, plan.positions) for text in tokens[:, None]]
    for i in range(model.spec.n_layers):  # both texts in turn, so that a layer is read once
        hidden = [model.block(i, h, cache, plan) for h, cache in zip(hidden, caches, strict=True)]
    logits = [model.head(h)[0] for h in hidden]
    if not all(bool(rows.amax(dim=-1).isfinite().all()) for rows in logits):
        raise non_finite_logits()
    return ReferenceOutput(tokens, torch.stack(logits), None, model.spec.engine)


def _texts(spec: ModelSpec) -> Tensor:
    """Return two random texts with a common beginning, [2, TEXT_TOKENS], equal in every call.

    Raises: ModelError if the model takes shorter texts only.
    """
    if spec.context_length is not None and spec.context_length < TEXT_TOKENS:
        raise ModelError(
            f"{spec.id} names a context of {spec.context_length} tokens, and a model is checked on "
            f"{TEXT_TOKENS}; correct the length in its files"
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (1, TEXT_TOKENS), generator=generator).repeat(2, 1)
    tokens[1, FORK_AT:] = torch.randint(
        0, spec.vocab_size, (TEXT_TOKENS - FORK_AT,), generator=generator
    )
    tokens[1, FORK_AT] = (tokens[0, FORK_AT] + 1) % spec.vocab_size
    return tokens.to(spec.device)


def _record_patterns(model: nn.Module, spec: ModelSpec) -> list[AttentionPattern] | None:
    from skipsearch.models.generic.forward_capture import CapturedForward  # imports transformers

    try:
        with silence_transformers():
            return CapturedForward(model, spec).attention_patterns
    except Exception:  # a model with a row in the table need not support capturing
        return None


def max_row_rmse(actual: Tensor, expected: Tensor) -> float:
    """Return the largest root mean square difference of a row of two [T, V] tensors.

    A maximum over logits would depend on the rounding of a single logit.
    """
    return float((actual.double() - expected.double()).square().mean(dim=-1).sqrt().max())
