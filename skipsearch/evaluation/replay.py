"""Fast replay: how a mask's draft would fare on the full model's own text, from one parallel forward a prompt.

The full model's greedy continuation is generated once and its K/V stay in the cache. A mask is then judged by ONE pass over all generated
positions: each query sees the full model's K/V at earlier positions and its own draft K/V at its own. That is exact for the first
token of a round; for later ones it takes the full model's K/V where the real draft has its own.
The pass plan says it all: the queries' own K/V go to spare slots behind the text, and each query is shown one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine import forward, inference
from skipsearch.errors import SearchError
from skipsearch.evaluation.together import continue_together
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter

BATCH = 16  # continuations of one forward


@dataclass(frozen=True)
class Replayed:
    """A mask on one prompt. agrees [G − 1]: the draft names the token that the full model emits next; confidence [G − 1]: its top
    probability. Entry j belongs to the draft pass that is fed generated token j and proposes token j + 1. room: tokens that were
    allowed behind the first generated one, of which the text may have used fewer."""

    agrees: np.ndarray
    confidence: np.ndarray
    room: int


@dataclass(frozen=True)
class Batch:
    """Continuations of similar length, padded on the right. fed: generated tokens 0 … G − 2, following: 1 … G − 1, both [B, T].

    prompts: which prompt each row is of; lengths: entries of each row that count.
    """

    fed: Tensor
    following: Tensor
    cache: KVCache
    plan: PassPlan
    prompts: tuple[int, ...]
    lengths: tuple[int, ...]


class Replay:
    """The full model's continuations of prompts, ready to judge any mask. prompts: token ids.

    Raises: SearchError if every continuation ends at once, so that there is nothing to replay.
    """

    def __init__(self, model: ModelAdapter, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_on_repeat: int | None,
                 progress: Callable[[int, int], None] = lambda done, total: None):
        self.model, context = model, model.spec.context
        self._rooms = [(max_new_tokens if context is None else min(max_new_tokens, context - len(p))) - 1 for p in prompts]
        self.tokens = continue_together(model, prompts, max_new_tokens, end_on_repeat, progress)
        self._starts = [len(p) for p in prompts]
        usable = sorted((i for i, generated in enumerate(self.tokens) if len(generated) > 1), key=lambda i: len(self.tokens[i]))
        if not usable:
            raise SearchError("the model ends every calibration prompt with its first token, so there is nothing to draft: "
                              "take another task")
        self.batches = [self._batch(prompts, tuple(usable[at:at + BATCH])) for at in range(0, len(usable), BATCH)]

    @inference
    def _batch(self, prompts: Sequence[Sequence[int]], chosen: tuple[int, ...]) -> Batch:
        """Run the full model over prompt and continuation once, and lay out the pass that every mask will make over it."""
        device = self.model.spec.device
        starts = torch.tensor([len(prompts[i]) for i in chosen], device=device)
        lengths = tuple(len(self.tokens[i]) - 1 for i in chosen)
        texts = [[*prompts[i], *self.tokens[i][:-1]] for i in chosen]
        longest, n = max(map(len, texts)), max(lengths)
        cache, planner = self.model.new_cache(len(chosen), longest + n), Planner(longest + n, device)
        # Padding stands behind the text of a row, where no causal query of that text can see it.
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        forward(self.model, padded, cache, planner.chain(0, longest, len(chosen)), last_only=True)
        own = longest + torch.arange(n, device=device)            # [T] slots of the queries' own K/V
        positions = starts[:, None] + torch.arange(n, device=device)  # [B, T]
        every = torch.arange(longest + n, device=device)
        earlier = (every < positions[..., None]) & (every < longest)
        visible = (earlier | (every == own[:, None]))[:, None]    # [B, 1, T, longest + n]
        plan = PassPlan(positions, own.expand(len(chosen), n), longest + n, visible, longest)
        rows = torch.tensor([self.tokens[i] + [0] * (n - length) for i, length in zip(chosen, lengths, strict=True)], device=device)
        return Batch(rows[:, :-1], rows[:, 1:], cache, plan, chosen, lengths)

    @inference
    def __call__(self, mask: SkipMask, most_prompts: int | None = None) -> list[Replayed]:
        """One `Replayed` for each prompt whose continuation has two tokens or more; of about `most_prompts` of them, if given."""
        judged: dict[int, Replayed] = {}
        stride = 1 if most_prompts is None else max(1, len(self.batches) * BATCH // most_prompts)
        for b in self.batches[::stride]:
            logits = forward(self.model, b.fed, b.cache, b.plan, mask).float()  # [B, T, V]
            top, token = logits.max(dim=-1)
            confidence = (top - logits.logsumexp(dim=-1)).exp().cpu().numpy()
            agrees = (token == b.following).cpu().numpy()
            for row, (prompt, length) in enumerate(zip(b.prompts, b.lengths, strict=True)):
                judged[prompt] = Replayed(agrees[row, :length], confidence[row, :length], self._rooms[prompt])
        return [judged[prompt] for prompt in sorted(judged)]

    def contexts(self) -> list[int]:
        """The shortest, the mean and the longest context that a position of these texts has: where a latency table is wanted."""
        stands = [start + at for start, text in zip(self._starts, self.tokens, strict=True) for at in range(len(text))]
        return sorted({min(stands), round(sum(stands) / len(stands)), max(stands)})

    def acceptance(self, mask: SkipMask, most_prompts: int | None = None) -> float:
        """α of the mask: share of positions at which its draft names the full model's token."""
        return float(np.concatenate([r.agrees for r in self(mask, most_prompts)]).mean())
