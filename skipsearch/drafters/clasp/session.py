"""Plan the mask of a request from the hidden states of its latest verified token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.base import DecodeContext
from skipsearch.drafters.clasp.dynamic_program import DPStep, solve_one_token
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.dynamic_mask import DynamicMaskDrafter, has_sequential_residual
from skipsearch.engine import LayerTap
from skipsearch.errors import MaskError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


class CLaSpDrafter(DynamicMaskDrafter):
    """A skip drafter that plans its mask by dynamic programming.

    Raises: MaskError for the unit `sublayer` on a model with a parallel residual."""

    def __init__(self, spec: CLaSp, model: ModelAdapter):
        if spec.unit == "sublayer" and not has_sequential_residual(model):
            raise MaskError(
                f"clasp plans whole layers on {model.spec.id}, whose attention and MLP read one "
                "state, so that there is none between them: write unit: layer"
            )
        steps = _build_steps(spec, model.spec.n_layers)
        super().__init__(lambda: CLaSpPolicy(spec, model, steps), spec.exit)


def _build_steps(spec: CLaSp, n_layers: int) -> list[DPStep]:
    """Return the steps of the dynamic program, in the order in which a pass runs them."""
    skippable = [i not in spec.never_skip for i in range(n_layers)]
    if spec.unit == "layer":
        return [DPStep(i, True, True, skippable[i]) for i in range(n_layers)]
    return [
        DPStep(i, attn, not attn, skippable[i]) for i in range(n_layers) for attn in (True, False)
    ]


class CLaSpPolicy:
    """A mask policy that captures hidden states of the full model and plans masks from them."""

    def __init__(self, spec: CLaSp, model: ModelAdapter, steps: Sequence[DPStep]):
        self.spec, self.model, self.steps = spec, model, steps
        # [1, rows, H] before each layer and after the last one, of the latest tapped pass
        self.hidden_states: list[Tensor] = []
        self.since_last_plan = 0  # in rounds or tokens (`spec.interval_unit`)
        self.has_begun = False  # whether the prefill is done

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        self.hidden_states = []
        # A plan is not due after this round. (If the interval counts tokens, it may be due; it then
        # waits for the next captured round.)
        if self.has_begun and self.since_last_plan + 1 < self.spec.interval:
            return None

        def capture(layer: int, hidden: Tensor) -> None:
            # The plan of a prefill is from its last token. In a verify pass, each row may be the
            # last accepted one.
            rows = hidden[:, :n_rows] if self.has_begun else hidden[:, n_rows - 1 : n_rows]
            self.hidden_states.append(rows)

        return capture

    def initial_mask(self, ctx: DecodeContext) -> SkipMask:
        self.has_begun = True
        return self._plan_mask(ctx, 0)

    def next_mask(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> SkipMask | None:
        by_rounds = self.spec.interval_unit == "rounds"
        self.since_last_plan += 1 if by_rounds else 1 + len(accepted_nodes)
        if self.since_last_plan < self.spec.interval or not self.hidden_states:
            return None
        return self._plan_mask(ctx, accepted_nodes[-1] if accepted_nodes else 0)

    def _plan_mask(self, ctx: DecodeContext, row_index: int) -> SkipMask:
        """Return a mask, planned from the states of one captured row.

        row_index: the row; its token is in the last committed slot.
        """
        self.since_last_plan = 0
        n_layers, device = self.model.spec.n_layers, self.model.spec.device
        n = ctx.cache.length
        states = torch.stack([h[0, row_index].to(device) for h in self.hidden_states])  # [L + 1, H]
        n_rows = min(self.spec.skip, sum(step.skippable for step in self.steps)) + 1
        # Each row replaces the token in slot n − 1. It does not attend to this slot, or the token
        # would count twice.
        position = torch.full((1, n_rows), n - 1, device=device)
        plan = ctx.planner.plan_replay(n, position, position, torch.arange(n_rows, device=device))

        def run_step(layer: int, rows: Tensor, attn: bool, mlp: bool) -> Tensor:
            after = self.model.block(layer, rows[None], ctx.cache, plan, attn=attn, mlp=mlp)
            return after[0].to(device)

        n_units = n_layers if self.spec.unit == "layer" else 2 * n_layers
        skipped = solve_one_token(states, self.steps, run_step, min(self.spec.skip, n_units - 1))
        return SkipMask.from_sublayers(n_layers, {s for step in skipped for s in step.sublayers})
