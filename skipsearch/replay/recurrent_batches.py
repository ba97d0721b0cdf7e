"""Batches for models with recurrent layers: a row for each position, with its recurrent states."""

from __future__ import annotations

import torch

from skipsearch.engine import forward, no_grad, run_layers
from skipsearch.errors import SearchError
from skipsearch.models.generic.recurrent import RecurrentCache, StateAt
from skipsearch.models.kv_cache import PassPlan, Planner
from skipsearch.replay.recurrent_cache import RecurrentReplayCache
from skipsearch.replay.replay_batches import ReplayBatch, ReplayBatches


class RecurrentReplayBatches(ReplayBatches):
    """Batches of one text each.

    The full model reads a text token by token, so that the recurrent states before each position
    are known. A batch that fits in memory is read once and kept. Any other batch is read again each
    time it is used. A mask is judged at all positions of the text in one pass.
    """

    def _estimate_nbytes(self, prompt_indices: tuple[int, ...], slot_bytes: int) -> int:
        cache = self.model.new_cache(1, 2)
        forward(
            self.model,
            torch.zeros(1, 1, dtype=torch.long, device=self.model.spec.device),
            cache,
            Planner(2, self.model.spec.device).plan_chain(0, 1),
        )
        return super()._estimate_nbytes(prompt_indices, slot_bytes) + self._shape(prompt_indices)[
            1
        ] * max(0, cache.nbytes - 2 * slot_bytes)

    @no_grad
    def _build(self, prompt_indices: tuple[int, ...]) -> ReplayBatch:
        model, device = self.model, self.model.spec.device
        prompt, text = self.prompt_ids[prompt_indices[0]], self.continuations[prompt_indices[0]]
        known, n = len(prompt), len(text) - 1
        length = known + n
        cache, planner = model.new_cache(1, length), Planner(length, device)
        if not isinstance(cache, RecurrentCache):
            raise SearchError(
                f"{model.spec.id} keeps recurrent states in a way that is not replayed: use the "
                "wall objective"
            )
        tokens = torch.tensor([[*prompt, *text]], device=device)
        forward(model, tokens[:, :known], cache, planner.plan_chain(0, known), last_only=True)
        states_at = list[StateAt]()
        for position in range(known, length):
            assert cache.end_state is not None
            states_at.append(cache.end_state)  # safe to keep: passes work on clones
            forward(
                model, tokens[:, position : position + 1], cache, planner.plan_chain(position, 1)
            )
        input_ids, labels = tokens[0, known:-1, None], tokens[0, known + 1 :, None]  # [A, 1]
        positions = torch.arange(known, length, device=device)[:, None]
        own_slots = torch.full_like(positions, length)
        earlier = torch.arange(length, device=device) < positions  # [A, length]
        visible = torch.cat([earlier, torch.ones_like(earlier[:, :1])], dim=1)[:, None, None]
        key_positions = torch.cat(
            [torch.arange(length, device=device).expand(n, -1), positions], dim=1
        )
        plan = PassPlan(
            positions, own_slots, length + 1, visible, length, key_positions=key_positions
        )
        replay_cache, states = RecurrentReplayCache(cache, length, states_at), list[torch.Tensor]()
        run_layers(
            model,
            model.embed(input_ids, positions),
            replay_cache,
            plan,
            tap=lambda i, h: states.append(h),
        )
        rows = torch.arange(n, device=device)
        if self.sampler is not None and prompt_indices not in self._target_probs:
            self._target_probs[prompt_indices] = self._target_probability(
                states[-1][:, 0], labels[:, 0]
            )
        return ReplayBatch(
            input_ids,
            labels,
            rows,
            replay_cache,
            plan,
            prompt_indices,
            (n,),
            tuple(states),
            self._target_probs.get(prompt_indices),
        )
