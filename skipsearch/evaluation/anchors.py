"""Texts of a model with recurrent layers, laid out for replay: a row for each position, with the states that the full model had there."""

from __future__ import annotations

import torch

from skipsearch.cache import PassPlan, Planner
from skipsearch.engine import forward, inference, onward
from skipsearch.errors import SearchError
from skipsearch.evaluation.continuations import Batch, Batches
from skipsearch.models.anchors import AnchoredCache
from skipsearch.models.recurrent import RecurrentCache, Standing


class AnchoredBatches(Batches):
    """As `Batches`, a text in each. The full model goes over a text token by token, once, or whenever its batch is asked for and was not
    kept; masks are judged at all of its positions in one pass."""

    def _bytes(self, chosen: tuple[int, ...], slot: int) -> int:
        cache = self.model.new_cache(1, 2)
        forward(self.model, torch.zeros(1, 1, dtype=torch.long, device=self.model.spec.device), cache,
                Planner(2, self.model.spec.device).chain(0, 1))
        return super()._bytes(chosen, slot) + self._shape(chosen)[1] * max(0, cache.bytes - 2 * slot)

    @inference
    def _made(self, chosen: tuple[int, ...]) -> Batch:
        model, device = self.model, self.model.spec.device
        prompt, text = self.prompts[chosen[0]], self.tokens[chosen[0]]
        known, n = len(prompt), len(text) - 1
        length = known + n
        cache, planner = model.new_cache(1, length), Planner(length, device)
        if not isinstance(cache, RecurrentCache):
            raise SearchError(f"{model.spec.id} keeps recurrent states in a way that is not replayed: use the wall objective")
        tokens = torch.tensor([[*prompt, *text]], device=device)
        forward(model, tokens[:, :known], cache, planner.chain(0, known), last_only=True)
        standings = list[Standing]()
        for at in range(known, length):
            assert cache.latest is not None
            standings.append(cache.latest)   # passes go on from clones
            forward(model, tokens[:, at:at + 1], cache, planner.chain(at, 1))
        fed, following = tokens[0, known:-1, None], tokens[0, known + 1:, None]                   # [A, 1]
        positions = torch.arange(known, length, device=device)[:, None]
        own = torch.full_like(positions, length)
        earlier = torch.arange(length, device=device) < positions                                  # [A, length]
        visible = torch.cat([earlier, torch.ones_like(earlier[:, :1])], dim=1)[:, None, None]
        places = torch.cat([torch.arange(length, device=device).expand(n, -1), positions], dim=1)
        plan = PassPlan(positions, own, length + 1, visible, length, key_positions=places)
        anchored, states = AnchoredCache(cache, length, standings), list[torch.Tensor]()
        onward(model, model.embed(fed, positions), anchored, plan, tap=lambda i, h: states.append(h))
        rows = torch.arange(n, device=device)
        if self.picker is not None and chosen not in self._chances:
            self._chances[chosen] = self._probability(states[-1][:, 0], following[:, 0])
        return Batch(fed, following, rows, anchored, plan, length, chosen, (n,), tuple(states), self._chances.get(chosen))
