"""`skip`: the model drafts for itself with some of its sub-layers left out."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from skipsearch.drafters.base import DecodeContext, Draft
from skipsearch.engine import draft_step
from skipsearch.exits import ExitPolicy
from skipsearch.mask import SkipMask


class SkipDrafter:
    """Source: Draft & Verify, section 3.2; the exit policies are its section 3.4."""

    kind: ClassVar[str] = "skip"

    def __init__(self, mask: SkipMask, exit_policy: ExitPolicy):
        self.mask, self.exit = mask, exit_policy
        self._drafted = 0

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft:
        token, tokens, probs, sure = ctx.pending, [], [], self.exit.reads_confidence
        for n in range(max_tokens):
            plan = ctx.planner.chain(ctx.cache.length + n, 1, ctx.cache.batch)
            scored = draft_step(ctx.model, token, ctx.cache, plan, self.mask, ctx.picker, sure)
            token, q = ctx.picker.draw(scored)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if scored.sure is not None and n + 1 < max_tokens and self.exit.stop(float(scored.sure), n + 1):
                break
        self._drafted = len(tokens)
        drafted: Tensor = torch.cat(tokens, dim=1)
        return Draft(drafted, (len(tokens),) * len(drafted), probs=torch.stack(probs, dim=1) if probs else None)

    def commit(self, accepted: list[list[int]]) -> None:
        for row in accepted:
            self.exit.observe(len(row), self._drafted)
