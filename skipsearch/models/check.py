"""Check at load that an adapter computes the logits of the model's own forward.

The check runs on random tokens. Its scenarios are one pass, several passes, a rollback of all draft
tokens, a rollback of some, and siblings of a tree. The tolerance is far below the effect of one
visible key more or less, which is measured on the same tokens. In 16 bits, and where
inputs of matrices are rounded, it is at least the effect of rounding each layer otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ForeignForward, ModelError, SkipSearchError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.generic.attention_pattern import AttentionPattern
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.models.loading.quantize import (
    GGUF_PREFIX,
    is_native_quantization,
    rounds_activations,
)
from skipsearch.models.reference import (
    FORK_AT,
    TEXT_TOKENS,
    TOLERANCE,
    ReferenceOutput,
    max_row_rmse,
)
from skipsearch.models.third_party import first_line_of

HALF_PRECISION = (torch.bfloat16, torch.float16)
# A trial for inputs of matrices that are rounded to 15 bits. A block of 32 has one step, by its
# largest input, which is several times an input of usual size. A layer rounds the inputs of four
# matrices, and the trial its output once.
INT16_UNIT = 2.0**-11
NOISE_RUNS = 4  # runs with rounded hidden states, of which the largest effect counts
MAX_TOLERANCE = 0.25  # the widest tolerance, in standard deviations of the logits
SCENARIOS = (  # by their names in errors
    "whole",
    "layer by layer",
    "in pieces",
    "after a rollback",
    "after half a rollback",
    "with siblings",
)


class CheckableAdapter(ModelAdapter, Protocol):
    """An adapter that can be checked: it knows the attention span of each layer."""

    @property
    def attention_spans(self) -> list[tuple[int | None, int | None]]:
        """(window, chunk) of each layer, in tokens; None: unlimited."""


@dataclass(frozen=True)
class CheckResult:
    """The largest differences of one row of logits, in standard deviations of the logits."""

    differences: dict[str, float]  # by scenario
    hidden_key: float  # the difference with one key hidden on purpose
    tolerance: float
    spans: bool  # whether windows and chunks were compared with the model's own masks

    def __str__(self) -> str:
        masks = ", and its own masks far behind" if self.spans else ""
        return (
            f"logits match the model's own forward ({', '.join(self.differences)}{masks}): they "
            "differ by at most "
            f"{max(self.differences.values()):.0e} of their standard deviation (limit "
            f"{self.tolerance:.0e}; "
            f"with one key hidden on purpose {self.hidden_key:.0e})"
        )


@torch.no_grad()
def check_against(model: CheckableAdapter, reference: ReferenceOutput) -> CheckResult:
    """Compare an adapter with recorded logits. Raises: ModelError that names the difference."""
    check_run, tolerance = _CheckRun(model, reference), TOLERANCE[model.spec.dtype]
    logit_std = float(reference.logits.float().std()) or 1.0
    hidden_key = max_row_rmse(*check_run.hide_one_key()) / logit_std
    quantization, engine = model.spec.quantization, model.spec.engine
    if engine == "native" and rounds_activations(quantization):
        tolerance = max(tolerance, TOLERANCE[torch.float32])
    is_exact = quantization is None or is_native_quantization(quantization)
    if tolerance >= TOLERANCE[torch.float16] or not is_exact:
        tolerance = min(max(tolerance, hidden_key / 2), MAX_TOLERANCE)
    differences: dict[str, float] = {}
    unit = torch.finfo(model.spec.dtype).eps if model.spec.dtype in HALF_PRECISION else 0.0
    if engine == "native" and rounds_activations(quantization):
        unit = max(unit, INT16_UNIT)
    may_round_further = unit > 0
    for scenario, run in check_run.scenarios().items():
        try:
            difference = differences[scenario] = max_row_rmse(*run()) / logit_std
        except (SkipSearchError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of a family's own code
            raise ModelError(
                f"{model.spec.id} cannot be driven {scenario} ({first_line_of(error)}), so it is "
                f"not decoded here; use another {'engine' if reference.engine else 'model'}"
            ) from None
        if not difference <= tolerance and may_round_further:
            may_round_further = False  # measured once, and only if it is needed
            noise = check_run.measure_rounding_noise(unit) / logit_std
            tolerance = max(tolerance, min(noise, MAX_TOLERANCE))
        if not difference <= tolerance:  # also rejects NaN
            by, way_out = "otherwise than its own forward", ""
            if reference.engine:
                by = f"by the engine {engine} otherwise than by {reference.engine}"
                is_folder = not str(quantization).startswith(GGUF_PREFIX)
                way_out = (
                    ": leave --quantization out"
                    if is_native_quantization(quantization) and is_folder
                    else f": use --engine {reference.engine}"
                )
            error_class = ModelError if reference.engine else ForeignForward
            raise error_class(
                f"{model.spec.id} is driven {by} {scenario}: logits differ by {difference:.2g} of "
                f"their standard deviation, and {tolerance:.2g} is allowed; it is not decoded "
                f"here{way_out}"
            )
    _check_spans(model, reference.attention_patterns)
    return CheckResult(differences, hidden_key, tolerance, reference.attention_patterns is not None)


def _check_spans(model: CheckableAdapter, patterns: list[AttentionPattern] | None) -> None:
    """Compare windows and chunks with the model's; they may be far longer than the check's text.

    Raises: ForeignForward if one differs from the model's own.
    """
    limit = model.spec.context_length or math.inf
    for i, (spans, pattern) in enumerate(zip(model.attention_spans, patterns or (), strict=False)):
        own_spans = pattern.window, pattern.chunk
        if [min(span or limit, limit) for span in spans] != [
            min(span or limit, limit) for span in own_spans
        ]:
            raise ForeignForward(
                f"{model.spec.id} is driven otherwise than its own forward in what layer {i} sees: "
                f"a window of {spans[0]} and chunks of {spans[1]}, and its own masks show "
                f"{own_spans[0]} and {own_spans[1]}; it is not decoded here"
            )


class _CheckRun:
    """The passes of one adapter over the reference's tokens.

    Each scenario returns logits [N, V] and the reference's rows for them. The first rows of a text
    are not compared, because rounding is largest there; later rows attend to their K/V."""

    def __init__(self, model: CheckableAdapter, reference: ReferenceOutput):
        self.model, self.reference = model, reference
        self.first, self.second = reference.tokens[:1], reference.tokens[1:]
        self.n_slots = 2 * TEXT_TOKENS + 4

    def scenarios(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        """Return the scenarios by name. A recurrent model cannot run the last one, siblings."""
        runs = (
            self.one_pass,
            self.layer_by_layer,
            self.in_chunks,
            self.full_rollback,
            self.partial_rollback,
            self.draft_tree,
        )
        n_runs = len(runs) - 1 if self.model.spec.is_recurrent else len(runs)
        return dict(zip(SCENARIOS[:n_runs], runs[:n_runs], strict=True))

    def one_pass(self) -> tuple[Tensor, Tensor]:
        cache, planner = self._allocate()
        logits = self._run_pass(self.first, cache, planner.plan_chain(0, TEXT_TOKENS))
        return logits[FORK_AT:], self.reference.logits[0, FORK_AT:]

    def layer_by_layer(self) -> tuple[Tensor, Tensor]:
        cache, planner = self._allocate()
        logits = self._run_layer_loop(self.first, cache, planner.plan_chain(0, TEXT_TOKENS))
        return logits[FORK_AT:], self.reference.logits[0, FORK_AT:]

    def in_chunks(self) -> tuple[Tensor, Tensor]:
        cache, planner = self._allocate()
        cuts = (0, 4, 5, TEXT_TOKENS)
        rows = [
            self._run_pass(self.first[:, a:b], cache, planner.plan_chain(a, b - a))
            for a, b in pairwise(cuts)
        ]
        return torch.cat(rows)[FORK_AT:], self.reference.logits[0, FORK_AT:]

    def full_rollback(self) -> tuple[Tensor, Tensor]:
        """Draft and verify the second text, then overwrite all of it with the first."""
        cache, planner = self._draft_and_verify(FORK_AT)
        plan = planner.plan_chain(FORK_AT, TEXT_TOKENS - FORK_AT)
        logits = self._run_pass(self.first[:, FORK_AT:], cache, plan)
        return logits, self.reference.logits[0, FORK_AT:]

    def partial_rollback(self) -> tuple[Tensor, Tensor]:
        """Draft and verify the second text from before the fork, so that some tokens are accepted.

        The first text continues after them in two passes. The second pass overwrites the last row
        of the first pass.
        """
        cache, planner = self._draft_and_verify(FORK_AT - 2)
        self._draft_two_tokens(self.first, FORK_AT, cache, planner)
        rows = self._run_pass(
            self.first[:, FORK_AT:-2], cache, planner.plan_chain(FORK_AT, TEXT_TOKENS - FORK_AT - 2)
        )
        last = self._run_pass(self.first[:, -3:], cache, planner.plan_chain(TEXT_TOKENS - 3, 3))
        return torch.cat([rows[:-1], last]), self.reference.logits[0, FORK_AT:]

    def _draft_and_verify(self, start: int) -> tuple[KVCache, Planner]:
        """Run the second text, with tokens from `start` on drafted and verified."""
        cache, planner = self._allocate()
        self._run_pass(self.first[:, :start], cache, planner.plan_chain(0, start))
        self._draft_two_tokens(self.second, start, cache, planner)
        self._run_pass(
            self.second[:, start:], cache, planner.plan_chain(start, TEXT_TOKENS - start)
        )
        return cache, planner

    def _draft_two_tokens(self, text: Tensor, start: int, cache: KVCache, planner: Planner) -> None:
        """Draft two tokens under two masks.

        One skips half of the sub-layers of each kind, the other the first layer. Later layers may
        need the output of the first layer.
        """
        n = self.model.spec.n_layers
        masks = (
            SkipMask(n, attn=tuple(range(n // 2, n)), mlp=tuple(range(0, n, 2))),
            SkipMask.from_layers(n, [0]),
        )
        for i, mask in enumerate(masks, start):
            self._run_pass(text[:, i : i + 1], cache, planner.plan_chain(i, 1), mask)

    def draft_tree(self) -> tuple[Tensor, Tensor]:
        """Run both texts as branches of one tree below their last common token."""
        cache, planner = self._allocate()
        self._run_pass(self.first[:, : FORK_AT - 1], cache, planner.plan_chain(0, FORK_AT - 1))
        branch = TEXT_TOKENS - FORK_AT
        parents = [
            parent for i in range(branch) for parent in ((0, 0) if i == 0 else (2 * i - 1, 2 * i))
        ]
        nodes = torch.stack([self.first[0, FORK_AT:], self.second[0, FORK_AT:]], dim=1).flatten()[
            None
        ]
        rows = self._run_pass(
            torch.cat([self.first[:, FORK_AT - 1 : FORK_AT], nodes], dim=1),
            cache,
            planner.plan_tree(FORK_AT - 1, parents),
        )
        return torch.cat([rows[:1], rows[1::2], rows[2::2]]), torch.cat(
            [self.reference.logits[0, FORK_AT - 1 :], self.reference.logits[1, FORK_AT:]]
        )

    def hide_one_key(self) -> tuple[Tensor, Tensor]:
        """Run a chain whose last row does not attend to the token two positions before it.

        A token cannot be hidden from a recurrent layer. For a recurrent model, another token takes
        its place instead.
        """
        cache, planner = self._allocate()
        if self.model.spec.is_recurrent:
            other = self.first.clone()
            other[:, -3] = (other[:, -3] + 1) % self.model.spec.vocab_size
            logits = self._run_pass(other, cache, planner.plan_chain(0, TEXT_TOKENS))
            return logits[-1:], self.reference.logits[0, -1:]
        self._run_pass(self.first[:, :-1], cache, planner.plan_chain(0, TEXT_TOKENS - 1))
        plan = planner.plan_chain(TEXT_TOKENS - 1, 1)
        mask = torch.ones(1, 1, 1, TEXT_TOKENS, dtype=torch.bool, device=plan.slots.device)
        mask[..., -3] = False
        plan = PassPlan(plan.positions, plan.slots, plan.n_keys, mask, plan.first_slot)
        return self._run_pass(self.first[:, -1:], cache, plan), self.reference.logits[0, -1:]

    def measure_rounding_noise(self, unit: float) -> float:
        """Return how far rounding moves a row of logits, by a trial on the hidden states.

        Each hidden state after a layer changes by a random amount of up to `unit` of itself, the
        unit in its last place. Two correct implementations differ by as much: each of them rounds
        the residual stream twice a layer, by up to half a unit. Deep models differ more than
        shallow ones.
        """
        cache, planner = self._allocate()
        plan = planner.plan_chain(0, TEXT_TOKENS)

        def round_otherwise(h: Tensor) -> Tensor:
            change = 2 * torch.rand(h.shape, generator=generator, dtype=torch.float64) - 1
            return (h.double() * (1 + unit * change.to(h.device))).to(h.dtype)

        largest = 0.0
        for text in (self.first, self.second):
            expected = self._run_layer_loop(text, cache, plan)[FORK_AT:]
            for seed in range(NOISE_RUNS):
                generator = torch.Generator().manual_seed(seed)
                logits = self._run_layer_loop(text, cache, plan, after_layer=round_otherwise)
                largest = max(largest, max_row_rmse(logits[FORK_AT:], expected))
        return largest

    def _allocate(self) -> tuple[KVCache, Planner]:
        return self.model.new_cache(1, self.n_slots), Planner(self.n_slots, self.model.spec.device)

    def _run_pass(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None
    ) -> Tensor:
        """Run a pass, by the adapter's pass runner if it can; return logits [T, V]."""
        model = self.model
        if (
            model.pass_runner is not None
            and (logits := model.pass_runner.run(tokens, cache, plan, mask, False)) is not None
        ):
            return logits[0].clone()  # the next pass of an engine may overwrite them
        return self._run_layer_loop(tokens, cache, plan, mask)

    def _run_layer_loop(
        self,
        tokens: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | None = None,
        after_layer: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        model = self.model
        h = model.embed(tokens, plan.positions)
        for i in range(model.spec.n_layers):
            attn, mlp = mask is None or i not in mask.attn, mask is None or i not in mask.mlp
            if attn or mlp:
                h = model.block(i, h, cache, plan, attn=attn, mlp=mlp)
                h = after_layer(h) if after_layer is not None else h
        return model.head(h)[0]
