"""Fast replay: how a mask's draft would fare on the full model's own text, from one parallel forward over all of its positions.

The full model's continuation is generated once and its K/V stay in the cache. A mask is then judged by ONE pass over all generated
positions: each query sees the full model's K/V at earlier positions and its own draft K/V at its own. That is exact for the first
token of a round; for later ones it takes the full model's K/V where the real draft has its own (`exact_replay.py` does not).
The pass plan says it all: the queries' own K/V go to spare slots behind the text, and each query is shown one of them.

Where a task samples, the text is a sample too, and nobody knows which tokens a draft would have drawn. But of all the ways in which a
round can emit token y, the share in which the draft drew it and it stood is min(p(y), q(y)) of p(y): min(1, q(y) / p(y)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skipsearch.decoding import Decoder
from skipsearch.decoding.sampling import Sampling
from skipsearch.engine import inference, onward
from skipsearch.errors import SearchError
from skipsearch.evaluation.anchors import AnchoredBatches
from skipsearch.evaluation.continuations import GREEDY, Batch, Batches, pieces, real_rows
from skipsearch.evaluation.together import continue_together
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter

RECURRENT = "; masks are judged at each position from the recurrent states that it had there, and drafts are chains without siblings"
MOST_RANK = 5   # one more than a token may have siblings


@dataclass(frozen=True)
class Replayed:
    """A mask on one prompt. agrees [G − 1]: the draft names the token that the full model emits next (bool), or, of a sampled text, the
    chance that a draft of that token was accepted (float, 0 … 1); confidence [G − 1]: its top probability, as an exit policy reads it.
    Entry j belongs to the draft pass that is fed generated token j and proposes token j + 1. room: tokens that were allowed behind the
    first generated one, of which the text may have used fewer. prompt: its number. rank [G − 1]: how many tokens the draft prefers to the
    full model's, at most MOST_RANK; None where the text is sampled."""

    agrees: np.ndarray
    confidence: np.ndarray
    room: int
    prompt: int = 0
    rank: np.ndarray | None = None


class Replay:
    """The full model's continuations of prompts, ready to judge any mask. prompts: token ids.

    sampling: how the task draws its tokens; prompt i is continued with seed + i. kv_bytes: memory for the K/V of the continuations,
    a quarter of what is free if None; what does not fit is run again for every mask (`batches.kept` of `len(batches)` fit).
    Raises: SearchError if every continuation ends at once, so that there is nothing to replay.
    """

    def __init__(self, model: ModelAdapter, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_on_repeat: int | None,
                 progress: Callable[[int, int], None] = lambda done, total: None, sampling: Sampling = GREEDY, seed: int = 0,
                 kv_bytes: int | None = None):
        self.model, self.prompts, self.sampling = model, prompts, sampling
        context = model.spec.context
        self.rooms = [(max_new_tokens if context is None else min(max_new_tokens, context - len(p))) - 1 for p in prompts]
        if sampling.greedy and model.spec.together:
            self.tokens = continue_together(model, prompts, max_new_tokens, end_on_repeat, progress)
        else:  # where tokens are drawn, with each prompt's own seed, as the decoder draws them
            decoder, self.tokens = Decoder(model), []
            for done, prompt in enumerate(prompts):
                self.tokens.append(decoder.generate(prompt, max_new_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
                                                    top_k=sampling.top_k, seed=seed + done, end_on_repeat=end_on_repeat).tokens)
                progress(done + 1, len(prompts))
        if not any(len(generated) > 1 for generated in self.tokens):
            raise SearchError("the model ends every calibration prompt with its first token, so there is nothing to draft: "
                              "take another task")
        kind = AnchoredBatches if model.spec.recurrent else Batches
        self.batches = kind(model, prompts, self.tokens, sampling, kv_bytes)

    @inference
    def __call__(self, mask: SkipMask, most_prompts: int | None = None, only: Sequence[int] | None = None,
                 draft: ModelAdapter | None = None) -> list[Replayed]:
        """One `Replayed` for each prompt whose continuation has two tokens or more; of about `most_prompts` of them, or of the batches
        with these indices, if given. draft: the model that drafts, where it has other weights than the one that verifies."""
        first = 0 if draft is not None else min(mask.sublayers, default=2 * mask.n_layers) // 2  # up to here the draft is the full model
        chosen: list[tuple[int, int]] = []                           # (prompt, positions)
        agrees, confidence, ranks = [], [], []
        for b in self.batches.about(most_prompts) if only is None else (self.batches[i] for i in only):
            states = onward(draft or self.model, b.states[first], b.cache, b.plan, mask, first)
            right, confident, rank = self._judge(b, real_rows(states, b.rows), draft or self.model)
            agrees.append(right)
            confidence.append(confident)
            ranks.append(rank)
            chosen += zip(b.prompts, b.lengths, strict=True)
        ends = np.cumsum([length for _, length in chosen])[:-1]
        parts = zip(chosen, *(np.split(torch.cat(x).cpu().numpy(), ends) for x in (agrees, confidence, ranks)), strict=True)
        found = {prompt: Replayed(right, confident, self.rooms[prompt], prompt, rank if self.sampling.greedy else None)
                 for (prompt, _), right, confident, rank in parts}
        return [found[prompt] for prompt in sorted(found)]

    def of(self, prompt: int) -> Replay:
        """The same text of this prompt alone, which is then number 0."""
        one = copy(self)
        one.prompts, one.tokens, one.rooms = [self.prompts[prompt]], [self.tokens[prompt]], [self.rooms[prompt]]
        one.batches = Batches(self.model, one.prompts, one.tokens, self.sampling)
        return one

    def contexts(self) -> list[int]:
        """The shortest, the mean and the longest context that a position of these texts has: where a latency table is wanted."""
        stands = [len(prompt) + at for prompt, text in zip(self.prompts, self.tokens, strict=True) for at in range(len(text))]
        return sorted({min(stands), round(sum(stands) / len(stands)), max(stands)})

    def acceptance(self, mask: SkipMask, most_prompts: int | None = None, draft: ModelAdapter | None = None) -> float:
        """α of the mask: share of positions at which its draft names the full model's token, or the mean chance that it does."""
        return float(np.concatenate([r.agrees for r in self(mask, most_prompts, draft=draft)]).mean())

    def _judge(self, b: Batch, states: Tensor, draft: ModelAdapter) -> tuple[Tensor, Tensor, Tensor]:
        """(agrees [N], confidence [N], rank [N]) from what goes into the head at the batch's positions, [N, H]."""
        following, judged = b.following.flatten()[b.rows], []
        for some in pieces(self.model, len(states)):
            logits = draft.head(states[some][None])[0]
            if b.chance is None or self.batches.picker is None:
                token, top = most_likely(logits)
                judged.append((token == following[some], top, rank_of(following[some], logits)))
            else:
                q = self.batches.picker.probs(logits)
                judged.append((accepted(q.gather(1, following[some, None])[:, 0], b.chance[some]), q.amax(dim=-1),
                               following[some]))
        agrees, confidence, rank = zip(*judged, strict=True)
        return torch.cat(agrees), torch.cat(confidence), torch.cat(rank)


def accepted(q: Tensor, p: Tensor) -> Tensor:
    """min(1, q / p), the chance that a token which was emitted had been drafted and stood; q, p [N]: what draft and full model gave it.

    Its mean over tokens drawn from p is Σ min(p, q), the α of Leviathan et al. 2023 (theorem 3.5). p is 0 only where a pass over many
    tokens rounds otherwise than the decoding that drew them.
    """
    return (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)


def rank_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """How many tokens have a higher logit than these, at most MOST_RANK: tokens [...], logits [..., V] -> [...]."""
    return (logits > logits.gather(-1, tokens[..., None])).sum(dim=-1).clamp(max=MOST_RANK)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy choice of a draft, and its top probability: logits [..., V] -> (tokens [...], top probability [...])."""
    token = logits.max(dim=-1).indices
    return token, logits.float().softmax(dim=-1).gather(-1, token[..., None])[..., 0]
