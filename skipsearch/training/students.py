"""Students: for each kind of draft, its trainable weights and its draft passes over a text.

The draft passes compute exactly what decoding computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.kangaroo.weights import ADAPTER_PREFIX, SUBLAYERS_BY_FORM, EarlyExitDraft
from skipsearch.drafters.s3d.weights import MASK_EMBEDDINGS, MultiTokenDraft
from skipsearch.drafters.trained.module_weights import DOWN_SUFFIX, UP_SUFFIX
from skipsearch.engine import no_grad, run_layers
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.kv_cache import KVCache, Planner
from skipsearch.training.distill_batch import (
    TeacherOutput,
    TeacherTargets,
    compute_teacher_targets,
    count_agreeing,
    make_draft_batch,
    run_draft_layers,
    run_teacher,
)


class Student(Protocol):
    """A draft with trainable weights."""

    parameters: dict[str, nn.Parameter]  # trainable weights, by their names in a module file
    facts: dict[str, Any]  # a checkpoint with other facts is of another training
    draft_length: int  # draft tokens that it is trained for
    card: dict[str, Any]  # of its module, without the facts of the training
    file_name: str  # of its module
    extra_bytes: int  # memory that the draft needs in addition to the model

    @property
    def model(self) -> ModelAdapter:
        """The full model."""

    def run_teacher(self, texts: Tensor, top_k: int) -> Any:
        """Run the full model over texts [B, T]; any number of draft passes may use the output."""

    def run_draft(self, teacher_output: Any, offset: int) -> tuple[Tensor, TeacherTargets]:
        """Return (input of the draft's head at every row [B, R, H], targets at these rows).

        teacher_output: from `run_teacher`. offset: the position of the first draft, 0 …
        draft_length − 1.
        """

    def head(self, h: Tensor) -> Tensor:
        """Return the draft's logits [..., V] from the output [..., H] of its layers."""


class AdaptedStudent:
    """A draft whose kept sub-layers are trained, as copies or by low-rank updates.

    Raises: ModelError for sub-layers that cannot be copied.
    """

    def __init__(
        self,
        model: HFAdapter,
        mask: SkipMask,
        rank: int | None = None,
        draft_length: int = 5,
        seed: int = 0,
    ):
        self.model, self.mask, self.draft_length = model, mask, draft_length
        sublayers = weight_overlay.kept_sublayers(mask)
        # Raises ModelError for sub-layers that cannot be trained, before anything is copied.
        n_values = count_values(model, sublayers)
        self.draft = weight_overlay.copy_sublayers(model, sublayers)
        self.parameters = dict(make_trainable(self.draft, sublayers, rank, seed))
        self.card = {
            "kind": "adapted",
            "attn": mask.attn,
            "mlp": mask.mlp,
            "form": "copy" if rank is None else "lora",
            "rank": rank,
        }
        self.facts = self.card | {"ahead": draft_length}
        suffix = "" if rank is None else f"-lora{rank}"
        self.file_name = f"adapted-{len(sublayers)}{suffix}.safetensors"
        self.extra_bytes = n_values * model.spec.dtype.itemsize  # low-rank updates are merged

    def run_teacher(self, texts: Tensor, top_k: int) -> TeacherOutput:
        return run_teacher(self.model, texts, top_k, _attention_layers(self.mask))

    def run_draft(
        self, teacher_output: TeacherOutput, offset: int
    ) -> tuple[Tensor, TeacherTargets]:
        batch = make_draft_batch(teacher_output, self.draft_length, offset)
        return run_draft_layers(self.draft, self.mask, batch), batch.targets

    def head(self, h: Tensor) -> Tensor:
        return self.draft.head(h)


class KangarooStudent:
    """An adapter after the first `exit_layer` layers.

    The adapter reads hidden states of the full model. One pass over a text therefore computes the
    draft steps of every round.
    """

    draft_length = 1

    def __init__(self, model: HFAdapter, exit_layer: int, form: str = "attention"):
        self.model = model
        adapter = weight_overlay.append_layer(model, exit_layer)
        assert isinstance(adapter, HFAdapter)
        n = model.spec.n_layers
        self.early_exit_draft = EarlyExitDraft(model, adapter, exit_layer, form)
        self.parameters = make_appended_layer_trainable(
            adapter, n, SUBLAYERS_BY_FORM[form], ADAPTER_PREFIX
        )
        self.facts = {"kind": "kangaroo", "exit_layer": exit_layer, "form": form}
        skipped = tuple(range(exit_layer, n))
        self.card = self.facts | {"attn": skipped, "mlp": skipped, "rank": None}
        suffix = "" if form == "attention" else "-layer"
        self.file_name = f"kangaroo-{exit_layer}{suffix}.safetensors"
        n_values = sum(parameter.numel() for parameter in self.parameters.values())
        self.extra_bytes = n_values * model.spec.dtype.itemsize

    def run_draft(
        self, teacher_output: tuple[Tensor, TeacherTargets], offset: int
    ) -> tuple[Tensor, TeacherTargets]:
        features, targets = teacher_output
        batch, length, _ = features.shape
        plan = Planner(length, features.device).plan_chain(0, length, batch)
        return self.early_exit_draft.run_adapter(
            features, KVCache(self.model.spec.n_layers + 1, batch, length), plan
        ), targets

    def head(self, h: Tensor) -> Tensor:
        return self.early_exit_draft.head(h)

    @no_grad
    def run_teacher(self, texts: Tensor, top_k: int) -> tuple[Tensor, TeacherTargets]:
        """Return (input of the exit layer, targets) at every position."""
        model, layer_inputs = self.model, dict[int, Tensor]()
        plan = Planner(texts.shape[1], texts.device).plan_chain(0, texts.shape[1], len(texts))
        cache = model.new_cache(len(texts), texts.shape[1])
        hidden = run_layers(
            model, model.embed(texts, plan.positions), cache, plan, tap=layer_inputs.__setitem__
        )
        targets = compute_teacher_targets(model, hidden, top_k)
        return layer_inputs[self.early_exit_draft.exit_layer], targets


class S3DStudent:
    """Mask-token embeddings of S3D and, if `rank` is given, low-rank updates of kept sub-layers.

    draft_length: number of tokens that one pass drafts.
    """

    def __init__(
        self,
        model: HFAdapter,
        mask: SkipMask,
        draft_length: int = 4,
        rank: int | None = None,
        seed: int = 0,
    ):
        self.model, self.mask, self.draft_length = model, mask, draft_length
        sublayers = weight_overlay.kept_sublayers(mask) if rank else []
        draft = weight_overlay.copy_sublayers(model, sublayers)
        wide = torch.promote_types(model.spec.dtype, torch.float32)
        with torch.no_grad():  # initial values: near the mean of all token embeddings
            probe = torch.arange(min(model.spec.vocab_size, 4096), device=model.spec.device)[None]
            known = model.embed(probe, torch.zeros_like(probe))[0].to(wide)
            random = torch.Generator().manual_seed(seed)
            noise = torch.randn(draft_length - 1, model.spec.hidden_size, generator=random).to(
                known
            )
            unknown = nn.Parameter(known.mean(dim=0) + 0.5 * known.std(dim=0) * noise)
        self.multi_token_draft = MultiTokenDraft(draft, mask, unknown)
        self.parameters = {
            MASK_EMBEDDINGS: unknown,
            **dict(make_trainable(draft, sublayers, rank, seed)),
        }
        self.card = {
            "kind": "s3d",
            "attn": mask.attn,
            "mlp": mask.mlp,
            "form": "lora" if rank else "embeddings",
            "rank": rank,
        }
        self.facts = self.card | {"ahead": draft_length}
        self.file_name = f"s3d-{draft_length}{f'-lora{rank}' if rank else ''}.safetensors"
        n_values = unknown.numel() + count_values(model, sublayers)
        self.extra_bytes = n_values * model.spec.dtype.itemsize

    def run_teacher(self, texts: Tensor, top_k: int) -> TeacherOutput:
        return run_teacher(self.model, texts, top_k, _attention_layers(self.mask))

    def run_draft(
        self, teacher_output: TeacherOutput, offset: int
    ) -> tuple[Tensor, TeacherTargets]:
        batch = make_draft_batch(teacher_output, self.draft_length, offset)
        h = self.model.embed(batch.input_ids, batch.plan.positions)
        groups = batch.input_ids.shape[1] // self.draft_length
        # [groups, draft_length − 1, H]
        unknown = self.multi_token_draft.mask_embeddings.to(h).repeat(groups, 1, 1)
        h = torch.cat(
            [
                h.unflatten(1, (groups, self.draft_length))[:, :, :1],
                unknown.expand(len(h), -1, -1, -1),
            ],
            dim=2,
        ).flatten(1, 2)
        return run_layers(
            self.multi_token_draft.model, h, batch.cache, batch.plan, self.mask
        ), batch.targets

    def head(self, h: Tensor) -> Tensor:
        return self.multi_token_draft.model.head(h)


def _attention_layers(mask: SkipMask) -> frozenset[int]:
    """Return the layers whose attention a draft runs."""
    return frozenset(range(mask.n_layers)) - frozenset(mask.attn)


def count_values(model: HFAdapter, sublayers: list[tuple[int, str]]) -> int:
    """Count the weights of sub-layers. Raises: ModelError if they cannot be read one by one."""
    return sum(
        weight.numel()
        for i, kind in sublayers
        for weight in weight_overlay.get_sublayer_weights(model, i, kind).values()
    )


def make_appended_layer_trainable(
    adapter: HFAdapter, layer: int, kinds: Sequence[str], prefix: str
) -> dict[str, nn.Parameter]:
    """Make an appended layer and the final norm trainable; return the parameters by name.

    adapter: from `weight_overlay.append_layer`. layer: number of the appended layer. kinds: its
    sub-layers that are trained. prefix: of their names in a module file.
    """
    wide = torch.promote_types(adapter.spec.dtype, torch.float32)
    parameters = {
        prefix + name.partition(".")[2]: parameter
        for name, parameter in make_trainable(adapter, [(layer, kind) for kind in kinds], None, 0)
    }
    for name, parameter in weight_overlay.get_final_norm(adapter).items():
        assert isinstance(parameter, nn.Parameter)
        parameter.data = parameter.data.to(wide, copy=True)  # the model's own, perhaps
        parameter.requires_grad_()
        parameters[name] = parameter
    return parameters


def make_trainable(
    model: HFAdapter, sublayers: list[tuple[int, str]], rank: int | None, seed: int
) -> Iterator[tuple[str, nn.Parameter]]:
    """Make copied sub-layers trainable; yield (name, parameter) of what is trained.

    Trained parameters have dtype float32, or a wider one if the model has it.
    rank: train low-rank updates of this rank in place of the matrices; None: train the matrices
    themselves. Parameters that are not matrices are always trained.
    """
    dtype = torch.promote_types(model.spec.dtype, torch.float32)
    random = torch.Generator().manual_seed(seed)
    for i, kind in sublayers:
        for part, module in list(weight_overlay.iter_sublayer_modules(model, i, kind)):
            for name, parameter in list(module.named_parameters()):
                full = f"{i}.{kind}.{part}.{name}"
                if rank is None or parameter.ndim != 2:
                    parameter.data = parameter.data.to(dtype, copy=True)  # the model's, perhaps
                    parameter.requires_grad_()
                    yield full, parameter
                    continue
                parameter.requires_grad_(False)
                change = LowRankChange(parameter, rank, dtype, random)
                owner, _, leaf = name.rpartition(".")
                parametrize.register_parametrization(
                    module.get_submodule(owner), leaf, change, unsafe=True
                )
                yield from ((full + DOWN_SUFFIX, change.down), (full + UP_SUFFIX, change.up))


class LowRankChange(nn.Module):
    """A parametrization of a matrix: weight + up · down. `up` is zero at the start.

    Source: LoRA (Hu et al. 2021), without its separate scale.
    """

    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, weight: Tensor, rank: int, dtype: torch.dtype, random: torch.Generator):
        super().__init__()
        out, into = weight.shape
        down = torch.randn(rank, into, generator=random, dtype=torch.float32) * into**-0.5
        self.down = nn.Parameter(down.to(weight.device, dtype))
        self.up = nn.Parameter(torch.zeros(out, rank, dtype=dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).to(weight.dtype)


@no_grad
def token_agreement(student: Student, texts: Tensor, head_rows: int) -> float:
    """Return the share of rows at which the draft predicts the full model's token.

    texts: [N, T]. head_rows: rows of logits at a time.
    """
    n_agreeing = n_rows = 0
    for part in texts.split(16):
        batch = part.long().to(student.model.spec.device)
        hidden, targets = student.run_draft(student.run_teacher(batch, 1), 0)
        n_agreeing += count_agreeing(student.head, hidden, targets, head_rows)
        n_rows += targets.tokens[..., 0].numel()
    return n_agreeing / max(1, n_rows)
