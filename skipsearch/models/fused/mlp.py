"""The MLP of a fused model, with or without experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.models.fused.linear import Linear
from skipsearch.models.fused.norms import RMSNorm


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """activation(gate) · up."""

    activation: Callable[[Tensor], Tensor]

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate · sigmoid(alpha · gate) · (up + 1), of gate and up cut to ±limit. Source: gpt_oss."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


Activation = GatedActivation | ClampedSwiGLU


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer with E experts chooses those that a row reads, and weighs their outputs.

    Source: the routers of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and gpt_oss.
    """

    router: Linear  # [E, H]
    per_token: int  # k: experts that a row reads
    normalizes: bool  # whether the weights of a row have a sum of 1

    @property
    def n_experts(self) -> int:
        return self.router.shape[0]

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights in float32, experts) of each row, [N, k] each, for rows [N, H]."""
        probs = self.router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probs.topk(self.per_token, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that all rows read: sigmoid(gate(x)) · down(act(gate_up(x))). Source: Qwen2-MoE."""

    gate_up: Linear  # [2 · S, H]: the rows of gate, then of up
    down: Linear  # [H, S]
    gate: Linear  # [1, H]

    def __call__(self, x: Tensor, act: Activation) -> Tensor:
        """Return the output for rows, [N, H] -> [N, H]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return torch.sigmoid(self.gate(x)) * self.down(act(gate, up))


@dataclass(frozen=True, slots=True)
class MLP:
    """An MLP sub-layer: h + post_norm(down(act(gate(x), up(x)))), where x = norm(h).

    With experts, the branch of a row is the weighted sum of the MLPs of the chosen experts.
    """

    norm: RMSNorm | None
    gate_up: Linear  # [2 · I, H]: the rows of gate, then of up; [2 · E · I, H] with experts
    act: Activation
    down: Linear  # [H, I]; [E · H, I] with experts
    post_norm: RMSNorm | None
    routing: Routing | None = None  # None: there are no experts
    shared: SharedExpert | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """Run the sub-layer: [B, T, H] -> [B, T, H]."""
        flat = h.view(-1, h.shape[-1])
        x = flat if self.norm is None else self.norm(flat)
        if self.routing is not None:
            branch = self._run_experts(x, self.routing)
            if self.shared is not None:
                branch = branch + self.shared(x, self.act)
            return (flat + (branch if self.post_norm is None else self.post_norm(branch))).view(
                h.shape
            )
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        branch = self.act(gate, up)
        return (
            self.down.add_to(flat, branch)
            if self.post_norm is None
            else flat + self.post_norm(self.down(branch))
        ).view(h.shape)

    def _run_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the branch of each row, [N, H] -> [N, H]."""
        weights, chosen = routing.choose(x)
        n, width = routing.n_experts, x.shape[1]
        gate_up = self.gate_up.to_dense().view(2, n, -1, width)
        down = self.down.to_dense().view(n, width, -1)
        gate_bias, up_bias = (
            (None, None) if self.gate_up.bias is None else self.gate_up.bias.view(2, n, -1)
        )
        down_bias = None if self.down.bias is None else self.down.bias.view(n, width)

        def multiply(rows: Tensor, matrices: Tensor, biases: Tensor | None, i: int) -> Tensor:
            return F.linear(rows, matrices[i], None if biases is None else biases[i])

        branch = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate = multiply(x[rows], gate_up[0], gate_bias, expert)
            up = multiply(x[rows], gate_up[1], up_bias, expert)
            output = multiply(self.act(gate, up), down, down_bias, expert)
            branch.index_add_(0, rows, output * weights[rows, places, None].to(branch.dtype))
        return branch.to(x.dtype)
