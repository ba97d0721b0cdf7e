"""S3D's trained part: embeddings that stand for tokens nobody knows yet, so that one thinned pass drafts several tokens at once.

    rows      embed(t_i), M_1, …, M_{γ-1} at positions i, …, i + γ − 1, each seeing the rows before it and the full model's K/V before i
    tier E    the embeddings M alone, H values each
    tier L    low-rank changes of the kept sub-layers beside them, for draft rows only; verification runs the untouched weights

Row k says what token i + k + 1 may be, whatever the tokens between are. As published, S3D trains the kept layers themselves, which changes
what the model says; here it does not. Source: S3D (Zhong & Bharadwaj 2024), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.engine import onward
from skipsearch.errors import ModuleError
from skipsearch.fields import ModuleRef
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.card import Card
from skipsearch.modules.weights import adapted, check_card, found_tensors

UNKNOWN = "unknown.weight"   # [γ − 1, H]: the embeddings of the tokens that a row does not know


class Simultaneous:
    """A model that drafts in one pass. model: what the pass runs; unknown: [γ − 1, H]."""

    def __init__(self, model: ModelAdapter, mask: SkipMask, unknown: Tensor):
        self.model, self.mask, self.unknown = model, mask, unknown

    @property
    def most(self) -> int:
        """γ: tokens of a draft."""
        return 1 + len(self.unknown)

    def states(self, token: Tensor, rows: int, cache: KVCache, plan: PassPlan) -> Tensor:
        """What goes into the head: [B, 1] -> [B, rows, H], rows ≤ γ."""
        known = self.model.embed(token, plan.positions[:, :1])
        unknown = self.unknown[:rows - 1].to(known).expand(len(token), -1, -1)
        return onward(self.model, torch.cat([known, unknown], dim=1), cache, plan, self.mask)


def simultaneous(model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]) -> Simultaneous:
    """Raises: ModuleError for a file that is missing, damaged, or made for another model."""
    return assembled(model, *found_tensors(ref, folders))


def assembled(model: ModelAdapter, card: Card, tensors: Mapping[str, Tensor], name: str) -> Simultaneous:
    """As `simultaneous`, of tensors that are read already. name: the file's, for errors."""
    check_card(card, "s3d", model.spec, name)
    changes = {key: tensor for key, tensor in tensors.items() if key != UNKNOWN}
    unknown = tensors.get(UNKNOWN)
    if unknown is None or unknown.ndim != 2 or unknown.shape[1] != model.spec.hidden or not len(unknown):
        raise ModuleError(f"{name}: this module does not fit {model.spec.id}: it needs {UNKNOWN} of [tokens, {model.spec.hidden}]; train "
                          "one for this model")
    if bool(changes) != (card.form == "lora"):
        raise ModuleError(f"{name}: its card says {card.form}, and its tensors do not; train it again")
    drafting = adapted(model, card, changes, name) if changes else model
    return Simultaneous(drafting, card.mask, unknown.to(model.spec.device, model.spec.dtype))
