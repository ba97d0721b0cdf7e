"""Layers with a recurrent state, by one call of the kernels between their projections.

transformers computes such a layer by some thirty operations for a pass over one token, and by an
algorithm for long texts for a pass over several. A pass over four tokens then takes three times as
long as a pass over one, and no draft can pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary

MAMBA_LAYERS = ("GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer")


class RecurrentNet(nn.Module):
    """A layer of transformers between whose projections the kernels compute."""

    head_shape: tuple[int, int]  # of the state of a head
    head_width: int  # outputs of a head

    def __init__(self, module: Any, library: NativeLibrary):
        """Make the module. module: what it replaces, which keeps projections and weights."""
        super().__init__()
        self.module, self.library = module, library
        self.layer_idx, self.layer_type = module.layer_idx, module.layer_type
        bias = module.conv1d.bias
        self._conv_weight = _as_floats(module.conv1d.weight.squeeze(1))
        self._conv_bias = None if bias is None else _as_floats(bias)
        self._step_biases = _as_floats(module.dt_bias)
        self._decay_rates = _as_floats(module.A_log.float().exp())

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute the layer, [B, T, H] to [B, T, H], and update the states of `cache_params`."""
        if attention_mask is not None and not bool(attention_mask.all()):  # padding, [B, T]
            padded: Tensor = self.module(hidden_states, cache_params, attention_mask, **options)
            return padded
        mixed, *inputs = self.project(hidden_states)
        mixed, state = mixed.transpose(1, 2), None
        if cache_params is not None:
            state = cache_params.get_recurrent_state(self.layer_idx, state_idx=0)
            mixed = cache_params.update_conv_state(
                mixed, self.layer_idx, conv_kernel_size=self.module.conv_kernel_size
            )
        out, after = self.run(_as_floats(mixed), *map(_as_floats, inputs), state=state)
        if cache_params is not None and after is not state:
            cache_params.update_recurrent_state(after, self.layer_idx)
        return self.finish(out.to(hidden_states.dtype), *inputs)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return what the convolution reads [B, T, channels], and the other inputs [B, T, …].

        The last ones are the steps [B, T, heads].
        """
        raise NotImplementedError

    def run(self, mixed: Tensor, *inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (output [B, T, heads · width], state after the last row).

        mixed: [B, channels, T or more]. state: of the row before, which is changed if the kernel
        can; None: the text begins.
        """
        batch, n_rows, n_heads = inputs[-1].shape  # steps
        shape = (batch, n_heads, *self.head_shape)
        after = torch.zeros(shape) if state is None else _as_floats(state)
        out = torch.empty(batch, n_rows, n_heads * self.head_width)
        self.call_kernel(self._conv_args(mixed, n_rows), inputs, after, out)
        return out, after

    def call_kernel(
        self, conv: structs.ConvArgs, inputs: Sequence[Tensor], states: Tensor, out: Tensor
    ) -> None:
        """Fill `out`, and change the states. inputs: as `project` returned them, in float32."""
        raise NotImplementedError

    def finish(self, out: Tensor, *inputs: Tensor) -> Tensor:
        """Return the layer's output. inputs: as `project` returned them."""
        projected: Tensor = self.module.out_proj(out)
        return projected

    def _conv_args(self, mixed: Tensor, n_rows: int) -> structs.ConvArgs:
        batch, channels, columns = mixed.shape
        return structs.ConvArgs(
            mixed.data_ptr(),
            self._conv_weight.data_ptr(),
            None if self._conv_bias is None else self._conv_bias.data_ptr(),
            batch,
            n_rows,
            channels,
            columns,
            self._conv_weight.shape[1],
            torch.get_num_threads(),
        )


class DeltaNet(RecurrentNet):
    """A gated delta net of Qwen3-Next or Qwen3.5 (Yang et al., arXiv 2412.06464)."""

    def __init__(self, module: Any, library: NativeLibrary):
        super().__init__(module, library)
        self._norm_weight = _as_floats(module.norm.weight)
        self.head_shape = module.head_k_dim, module.head_v_dim
        self.head_width = module.head_v_dim

    @staticmethod
    def replaces(module: Any) -> bool:
        """Return whether a module is a layer that this class computes."""
        return (
            type(module).__name__.endswith("GatedDeltaNet")
            and (hasattr(module, "in_proj_qkvz") or hasattr(module, "in_proj_qkv"))
            and module.activation == "silu"
        )

    def project(self, x: Tensor) -> list[Tensor]:
        """Return (queries, keys and values, gates, logits of beta, steps)."""
        module = self.module
        if hasattr(module, "in_proj_qkv"):
            projections = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
            return [project(x) for project in projections]
        *qkv, gates, beta_logits, steps = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(x), module.in_proj_ba(x)
        )
        return [torch.cat([part.flatten(2) for part in qkv], dim=-1), gates, beta_logits, steps]

    def call_kernel(
        self, conv: structs.ConvArgs, inputs: Sequence[Tensor], states: Tensor, out: Tensor
    ) -> None:
        module, (gates, beta_logits, steps) = self.module, inputs
        self.library.call(
            "run_delta_net",
            structs.DeltaNetArgs(
                conv,
                gates.data_ptr(),
                beta_logits.data_ptr(),
                steps.data_ptr(),
                self._step_biases.data_ptr(),
                self._decay_rates.data_ptr(),
                self._norm_weight.data_ptr(),
                module.layer_norm_epsilon,
                states.data_ptr(),
                out.data_ptr(),
                module.num_k_heads,
                module.num_v_heads,
                module.head_k_dim,
                module.head_v_dim,
            ),
        )


class Mamba(RecurrentNet):
    """A layer of Mamba 2 of Granite's hybrids or Nemotron-H (Dao and Gu, arXiv 2405.21060)."""

    def __init__(self, module: Any, library: NativeLibrary):
        super().__init__(module, library)
        self._skips = _as_floats(module.D)
        self.head_shape = module.head_dim, module.ssm_state_size
        self.head_width = module.head_dim

    @staticmethod
    def replaces(module: Any) -> bool:
        """Return whether a module is a layer that this class computes."""
        return type(module).__name__ in MAMBA_LAYERS and module.activation == "silu"

    def project(self, x: Tensor) -> list[Tensor]:
        """Return (inputs, B and C, gates, steps)."""
        module = self.module
        gates, mixed, steps = module.in_proj(x).split(
            [module.intermediate_size, module.conv_dim, module.num_heads], dim=-1
        )
        return [mixed, gates, steps]

    def call_kernel(
        self, conv: structs.ConvArgs, inputs: Sequence[Tensor], states: Tensor, out: Tensor
    ) -> None:
        module, (_, steps) = self.module, inputs
        self.library.call(
            "run_mamba",
            structs.MambaArgs(
                conv,
                steps.data_ptr(),
                self._step_biases.data_ptr(),
                *module.time_step_limit,
                self._decay_rates.data_ptr(),
                self._skips.data_ptr(),
                states.data_ptr(),
                out.data_ptr(),
                module.num_heads,
                module.n_groups,
                module.head_dim,
                module.ssm_state_size,
            ),
        )

    def finish(self, out: Tensor, *inputs: Tensor) -> Tensor:
        return super().finish(self.module.norm(out, inputs[0]).to(out.dtype))


def replace_recurrent_nets(model: nn.Module, library: NativeLibrary) -> None:
    """Replace the recurrent layers of a model by those that the kernels compute."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            for kind in (DeltaNet, Mamba):
                if kind.replaces(module) and not isinstance(parent, RecurrentNet):
                    setattr(parent, name, kind(module, library))


def _as_floats(values: Tensor) -> Tensor:
    return values.detach().to(torch.float32).contiguous()
