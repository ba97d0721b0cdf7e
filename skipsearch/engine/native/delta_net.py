"""The layer of a gated delta net, by one call of the kernels between its projections.

transformers computes it by some thirty operations for a pass over one token, and by an algorithm for
64 tokens at once for a pass over several. A pass over four tokens then takes three times as long as
a pass over one, and no draft can pay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary


def is_delta_net(module: nn.Module) -> bool:
    """Return whether a module is a layer of transformers that `DeltaNet` can replace."""
    projections = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b")
    return (
        type(module).__name__.endswith("GatedDeltaNet")
        and any(all(hasattr(module, name) for name in names) for names in projections)
        and getattr(module, "activation", None) == "silu"
        and getattr(module.norm, "activation", "silu") == "silu"
    )


class DeltaNet(nn.Module):
    """A gated delta net of Qwen3-Next or Qwen3.5 (Yang et al., arXiv 2412.06464)."""

    def __init__(self, module: Any, library: NativeLibrary):
        """Make the module. module: what it replaces, which keeps projections and weights."""
        super().__init__()
        self.module, self.library = module, library
        self.layer_idx, self.layer_type = module.layer_idx, module.layer_type
        bias = module.conv1d.bias
        self._weights = {
            "conv_weight": _as_floats(module.conv1d.weight.squeeze(1)),
            "conv_bias": None if bias is None else _as_floats(bias),
            "step_biases": _as_floats(module.dt_bias),
            "decay_rates": _as_floats(module.A_log.float().exp()),
            "norm_weight": _as_floats(module.norm.weight),
        }

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the layer, [B, T, H] to [B, T, H], and update the states of `cache_params`."""
        if attention_mask is not None:  # of padding, [B, T]
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        n_rows = hidden_states.shape[1]
        mixed, gates, beta_logits, steps = self._project(hidden_states)
        mixed, state = mixed.transpose(1, 2), None
        if cache_params is not None:
            state = cache_params.get_recurrent_state(self.layer_idx, state_idx=0)
            mixed = cache_params.update_conv_state(
                mixed, self.layer_idx, conv_kernel_size=self.module.conv_kernel_size
            )
        out, after = self._run(*map(_as_floats, (mixed, gates, beta_logits, steps)), state)
        if cache_params is not None and after is not state:
            cache_params.update_recurrent_state(after, self.layer_idx)
        out = out.view(len(out), n_rows, -1).to(hidden_states.dtype)
        return self.module.out_proj(out)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (queries, keys and values [B, T, channels], gates, logits of beta, steps)."""
        module = self.module
        if hasattr(module, "in_proj_qkv"):
            projections = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
            qkv, gates, beta_logits, steps = (project(x) for project in projections)
            return qkv, gates, beta_logits, steps
        *qkv, gates, beta_logits, steps = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(x), module.in_proj_ba(x)
        )
        return torch.cat([part.flatten(2) for part in qkv], dim=-1), gates, beta_logits, steps

    def _run(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta_logits: Tensor,
        steps: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output [B, T, heads · value size], state after the last row).

        state: of the row before, which is changed if the kernel can; None: the text begins.
        """
        module, (batch, n_rows) = self.module, beta_logits.shape[:2]
        shape = (batch, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        if state is None:
            after = torch.zeros(shape)
        elif state.dtype == torch.float32 and state.is_contiguous():
            after = state
        else:
            after = _as_floats(state)
        out = torch.empty(batch, n_rows, module.num_v_heads * module.head_v_dim)
        pointers = {
            name: None if value is None else value.data_ptr()
            for name, value in self._weights.items()
        }
        self.library.run_delta_net(
            structs.DeltaNetArgs(
                mixed=mixed.data_ptr(),
                gates=gates.data_ptr(),
                beta_logits=beta_logits.data_ptr(),
                steps=steps.data_ptr(),
                norm_eps=module.layer_norm_epsilon,
                states=after.data_ptr(),
                out=out.data_ptr(),
                batch=batch,
                rows=n_rows,
                columns=mixed.shape[-1],
                kernel=module.conv_kernel_size,
                key_heads=module.num_k_heads,
                value_heads=module.num_v_heads,
                key_dim=module.head_k_dim,
                value_dim=module.head_v_dim,
                threads=torch.get_num_threads(),
                **pointers,
            )
        )
        return out, after


def replace_delta_nets(model: nn.Module, library: NativeLibrary) -> None:
    """Replace the gated delta nets of a model by those that the kernels compute."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if is_delta_net(module) and not isinstance(parent, DeltaNet):
                setattr(parent, name, DeltaNet(module, library))


def _as_floats(values: Tensor) -> Tensor:
    return values.detach().to(torch.float32).contiguous()
