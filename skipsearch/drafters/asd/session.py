"""Choose the mask of a request from cosines between the input and output of attention blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import cosine_similarity

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.asd.rule import select_sublayers
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.base import DecodeContext
from skipsearch.drafters.dynamic_mask import DynamicMaskDrafter, has_sequential_residual
from skipsearch.engine import LayerTap, MidLayerTap
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


class ASDDrafter(DynamicMaskDrafter):
    """A skip drafter that chooses its mask from the prefill of each prompt."""

    def __init__(self, spec: ASD, model: ModelAdapter):
        is_sequential = has_sequential_residual(model)
        super().__init__(lambda: ASDPolicy(spec, model.spec.n_layers, is_sequential), spec.exit)


class ASDPolicy:
    """A mask policy that sums cosines over the prefill and then chooses one mask.

    is_sequential: whether the MLP of a layer reads the output of its attention. The pass itself
    then computes the state after the attention; otherwise the tap computes it.
    """

    def __init__(self, spec: ASD, n_layers: int, is_sequential: bool):
        self.spec, self.n_layers, self.is_sequential = spec, n_layers, is_sequential
        self.n_rows, self.decided = 0, False
        self._cosine_sums: list[Tensor] = []  # of the attention of each layer

    @property
    def cosine_sums(self) -> list[float]:
        """The sum of the cosines of each layer over the `n_rows` tokens of the prefill.

        A cosine is between the hidden states before and after the layer's attention.
        """
        return [float(total) for total in self._cosine_sums]

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        if self.decided:
            return None
        self.n_rows += n_rows

        def add_cosines(layer: int, before: Tensor, after: Tensor) -> None:
            total = cosine_similarity(
                before[0, :n_rows].float(), after[0, :n_rows].to(before.device).float(), dim=-1
            ).sum()
            if layer == len(self._cosine_sums):
                self._cosine_sums.append(total)
            else:
                self._cosine_sums[layer] = self._cosine_sums[layer] + total

        def observe(layer: int, hidden: Tensor) -> MidLayerTap | None:
            if layer == self.n_layers:
                return None
            if self.is_sequential:
                return lambda after: add_cosines(layer, hidden, after)
            # The pass overwrites the K/V that this call of the block writes.
            add_cosines(layer, hidden, model.block(layer, hidden, cache, plan, mlp=False))
            return None

        return observe

    def initial_mask(self, ctx: DecodeContext) -> SkipMask:
        self.decided = True
        return self.select_mask(self.spec)

    def select_mask(self, spec: ASD) -> SkipMask:
        """Return the mask that ASD with these settings chooses from the cosines so far."""
        sums = self.cosine_sums or [0.0] * self.n_layers
        cosines = [total / max(1, self.n_rows) for total in sums]
        return SkipMask(
            len(cosines), *select_sublayers(cosines, spec.threshold, spec.every, spec.keep_last)
        )

    def next_mask(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> SkipMask | None:
        return None
