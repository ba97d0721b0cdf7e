"""What a server may take of the memory, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.decoding.prefix_cache import FIRST_TOKENS
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.placement import in_gb
from skipsearch.replay.text_kv import bytes_of_a_slot
from skipsearch.serve.limits import Limits


def describe_memory(
    model: ModelAdapter,
    limits: Limits,
    draft_bytes: int = 0,
    draft_models: Sequence[ModelAdapter] = (),
) -> str:
    """Return the weights, the K/V of a token, and the most that the server's caches take.

    draft_bytes: of the weights that only drafts read. draft_models: have K/V of the same texts. The
    rules are those of SECURITY.md ("What the
    server keeps in memory"). A model with recurrent layers has states of another kind, so only its
    weights are named.
    """
    weights = f"{in_gb(model.weight_bytes)} of weights"
    if draft_bytes:
        weights += f" and {in_gb(draft_bytes)} for drafts"
    if model.spec.is_recurrent:
        return f"memory: {weights}; the states of texts come on top"
    context, slot_bytes = limits.context_of(model.spec), bytes_of_a_slot(model)
    text_slot_bytes = slot_bytes + sum(
        bytes_of_a_slot(draft_model)
        for draft_model in draft_models
        if not draft_model.spec.is_recurrent
    )
    running = limits.max_num_seqs * (2 * context + FIRST_TOKENS) * text_slot_bytes
    parts = [
        f"{in_gb(running)} for {limits.max_num_seqs} running requests of up to {context:,} tokens",
        f"{in_gb(limits.prefix_bytes)} for finished texts",
    ]
    if limits.batch_passes:
        parts.insert(1, f"{in_gb(limits.batch_slots * slot_bytes)} for their batch")
    return (
        f"memory: {weights}, {text_slot_bytes / 1e3:,.0f} KB of K/V a token; at most "
        f"{', '.join(parts)} (--context, --max-num-seqs and --prefix-memory lower that)"
    )
