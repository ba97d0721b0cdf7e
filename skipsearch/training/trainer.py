"""Train a draft's weights towards the full model's distribution, at the rows of its draft passes.

These are the rows that the draft computes in rounds of decoding (`training/distill_batch.py`). The
full model's weights do not change. The loss is the cross-entropy with the full model's distribution
at a temperature, restricted to its most likely tokens, which have nearly all of its probability.
This is distillation (Hinton et al. 2015) of a model into a part of itself. The optimizer is AdamW.
Its learning rate warms up, then decays as a cosine over the steps or the time of the training.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from skipsearch.core.files import hash_facts
from skipsearch.errors import ModuleError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.training.distill_batch import max_head_rows
from skipsearch.training.students import Student

CHECKPOINT_INTERVAL_S = 30.0  # a killed training loses at most this and its current step
WARM_UP_STEPS = 20
MAX_GRAD_NORM = 1.0
SMOOTHING = 0.95  # exponential, of the reported loss and agreement


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a training.

    Training ends at the first limit that is reached. None is no limit.
    """

    steps: int | None = None
    seconds: float | None = 600.0
    batch_size: int = 16  # texts per step
    learning_rate: float = 3e-3
    top_k: int = 64  # the full model's most likely tokens, to which the loss is restricted
    # Steps that use the output of one pass of the full model, which takes half of a step's time.
    # These steps are not consecutive, and their drafts start at different positions.
    steps_per_teacher_pass: int = 3
    # Of the full model's distribution. Low values suit greedy drafts; for sampled drafts, use the
    # temperature at which they are sampled.
    temperature: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a training."""

    n_steps: int
    loss: float  # nats, smoothed
    agreement: float  # share of rows that predict the full model's token, 0..1, smoothed
    seconds: float
    seconds_left: float
    share_done: float


class Trainer:
    """A training that can be interrupted and resumed.

    texts: [N, T] token ids on the CPU. Raises: ModuleError if the texts are too short for a draft.
    """

    def __init__(self, student: Student, texts: Tensor, settings: TrainSettings):
        if texts.ndim != 2 or texts.shape[1] < 2 * student.draft_length or not len(texts):
            raise ModuleError(
                f"there is too little text to train on ({texts.numel()} tokens): give more with "
                "--data"
            )
        if not settings.steps and not settings.seconds:
            raise ModuleError(
                f"steps is {settings.steps} and seconds is {settings.seconds}: a training needs a "
                "limit above 0, of steps or of seconds"
            )
        self.student, self.texts, self.settings = student, texts, settings
        self.parameters = student.parameters
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.n_steps, self.seconds, self.n_rows, self.loss, self.agreement = 0, 0.0, 0, 0.0, 0.0
        self._teacher_outputs: dict[int, Any] = {}

    @property
    def fingerprint(self) -> str:
        """A hash that a checkpoint stores. It covers all settings and data except the length."""
        facts = {k: v for k, v in asdict(self.settings).items() if k not in ("steps", "seconds")}
        spec = self.student.model.spec
        facts |= self.student.facts | {
            "batch": self.settings.batch_size,
            "model": spec.weights_sha256 or spec.id,
            "dtype": spec.dtype_name,
            "texts": hashlib.sha256(self.texts.numpy().tobytes()).hexdigest(),
        }
        return hash_facts(facts)

    def run(
        self,
        checkpoint: Path | None = None,
        on_progress: Callable[[TrainProgress], None] = lambda step: None,
    ) -> None:
        """Run steps until a limit is reached.

        checkpoint: the file of the training's checkpoint. If it exists, the training is resumed
        from it. Raises: ModuleError."""
        if checkpoint is not None and checkpoint.exists():
            self.load_checkpoint(checkpoint)
        saved_at = perf_counter()
        share = self._share_done()
        while share < 1:
            began = perf_counter()
            self.run_step(share)
            self.seconds += perf_counter() - began
            share = self._share_done()
            on_progress(
                TrainProgress(
                    self.n_steps,
                    self.loss,
                    self.agreement,
                    self.seconds,
                    self.seconds * (1 / share - 1),
                    share,
                )
            )
            if checkpoint is not None and perf_counter() - saved_at > CHECKPOINT_INTERVAL_S:
                self.save_checkpoint(checkpoint)
                saved_at = perf_counter()
        if checkpoint is not None:
            self.save_checkpoint(checkpoint)

    def run_step(self, share_done: float) -> None:
        """Run one step of the optimizer. share_done: share of the training that is done, 0..1."""
        settings = self.settings
        first = int(
            torch.randint(
                self.student.draft_length, (), generator=self._make_generator(self.n_steps)
            )
        )
        with make_autocast(self.student.model):
            loss, agreement, n_rows = self.accumulate_gradients(self._get_teacher_output(), first)
        norm = float(clip_grad_norm_(self.parameters.values(), MAX_GRAD_NORM))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ModuleError(
                f"the loss is {loss} and its gradients have the norm {norm} at step "
                f"{self.n_steps}: train with a lower --learning-rate than "
                f"{settings.learning_rate:g}"
            )
        rate = (
            settings.learning_rate
            * min(1.0, (self.n_steps + 1) / WARM_UP_STEPS)
            * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share_done)))
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mix = SMOOTHING if self.n_steps else 0.0
        self.loss, self.agreement = (
            mix * self.loss + (1 - mix) * loss,
            mix * self.agreement + (1 - mix) * agreement,
        )
        self.n_steps += 1
        self.n_rows += n_rows

    def _get_teacher_output(self) -> Any:
        """Return the teacher output that this step trains on.

        The last few outputs are in memory, and steps use them in turn. So consecutive steps rarely
        use the same texts.
        """
        newest, turn = divmod(self.n_steps, self.settings.steps_per_teacher_pass)
        index = max(0, newest - turn)
        self._teacher_outputs = {
            n: output
            for n, output in self._teacher_outputs.items()
            if n > newest - self.settings.steps_per_teacher_pass
        }
        if index not in self._teacher_outputs:
            texts = self.texts[self._choose_texts(index)].long().to(self.student.model.spec.device)
            self._teacher_outputs[index] = self.student.run_teacher(texts, self.settings.top_k)
        return self._teacher_outputs[index]

    def _choose_texts(self, index: int) -> list[int]:
        """Return the texts of a teacher pass: each is read once before any is read again."""
        first, chosen = index * self.settings.batch_size, list[int]()
        for place in range(first, first + self.settings.batch_size):
            epoch, i = divmod(place, len(self.texts))
            order = torch.randperm(len(self.texts), generator=self._make_generator(epoch))
            chosen.append(int(order[i]))
        return chosen

    def _make_generator(self, number: int) -> torch.Generator:
        """Return the random generator of a step, or of an order of the texts.

        It depends on the seed and the number alone, so a checkpoint need not store its state.
        """
        return torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)

    @property
    def tokens_read(self) -> int:
        """The tokens that the full model has read so far."""
        return (
            -(-self.n_steps // self.settings.steps_per_teacher_pass)
            * self.settings.batch_size
            * self.texts.shape[1]
        )

    def accumulate_gradients(self, teacher_output: Any, offset: int) -> tuple[float, float, int]:
        """Add the gradients of one draft pass, and return (loss, agreement, rows).

        Only a few rows of logits are in memory at a time."""
        hidden, targets = self.student.run_draft(teacher_output, offset)
        flat = hidden.detach().flatten(0, 1).requires_grad_()
        tokens = targets.tokens.flatten(0, 1)
        # A row without any target, whose probabilities are all 0, has no loss.
        shares = (targets.probs.flatten(0, 1).log() / self.settings.temperature).softmax(dim=-1)
        shares = shares.nan_to_num()
        total, n_agreeing, max_rows = 0.0, 0, max_head_rows(self.student.model)
        for start in range(0, len(flat), max_rows):
            logits = self.student.head(flat[None, start : start + max_rows])[0].float()
            taught = logits.gather(-1, tokens[start : start + max_rows].clamp(min=0))
            unlikelihood = logits.logsumexp(dim=-1, keepdim=True) - taught
            loss = (shares[start : start + max_rows] * unlikelihood).sum() / len(flat)
            loss.backward()
            total += float(loss.detach())
            n_agreeing += int((logits.argmax(dim=-1) == tokens[start : start + max_rows, 0]).sum())
        hidden.backward(flat.grad.view_as(hidden))  # type: ignore[union-attr]
        return total, n_agreeing / len(flat), len(flat)

    def export_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a module by name.

        They are bfloat16 if the model's passes are in 16 bits or its weights are quantised.
        Otherwise, they have the model's dtype.
        """
        spec = self.student.model.spec
        has_few_bits = is_half(self.student.model) or spec.quantization is not None
        dtype = torch.bfloat16 if has_few_bits else spec.dtype
        return {name: parameter.detach().to(dtype) for name, parameter in self.parameters.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the values of all parameters."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    def save_checkpoint(self, path: Path) -> None:
        """Write a checkpoint atomically. Raises: ModuleError."""
        unfinished = path.with_name(f"{path.name}.half")
        try:
            torch.save(
                {
                    "fingerprint": self.fingerprint,
                    "parameters": {n: p.detach() for n, p in self.parameters.items()},
                    "optimizer": self.optimizer.state_dict(),
                    "done": self.n_steps,
                    "seconds": self.seconds,
                    "rows": self.n_rows,
                    "loss": self.loss,
                    "agreement": self.agreement,
                },
                unfinished,
            )
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:
            raise ModuleError(
                f"cannot write {path}: {getattr(error, 'strerror', None) or error}; choose another "
                "--out"
            ) from None

    def load_checkpoint(self, path: Path) -> None:
        """Resume from a checkpoint.

        Raises: ModuleError if it is damaged or of another training."""
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            same = state["fingerprint"] == self.fingerprint
        except Exception:  # torch raises various errors for a file of another format
            raise ModuleError(
                f"{path}: this checkpoint is damaged: remove it, or start again with --force"
            ) from None
        if not same:
            raise ModuleError(
                f"{path} holds another training (another model, text, mask or other settings): "
                "give its settings to go on, "
                "another --out, or --force to start again"
            )
        self.load_tensors(state["parameters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.n_steps, self.seconds, self.n_rows = state["done"], state["seconds"], state["rows"]
        self.loss, self.agreement = state["loss"], state["agreement"]

    def _share_done(self) -> float:
        """Return the share of the training that is done; 1 or more at the end."""
        steps, seconds = self.settings.steps, self.settings.seconds
        return max(
            self.n_steps / steps if steps else 0.0, self.seconds / seconds if seconds else 0.0
        )


def is_half(model: ModelAdapter) -> bool:
    """Return whether the model's passes are computed in 16 bits."""
    return model.spec.dtype in (torch.bfloat16, torch.float16)


def make_autocast(model: ModelAdapter) -> AbstractContextManager[Any]:
    """Return a context in which matrices in float32 are multiplied in 16 bits.

    That is the model's dtype. A model of the engine native computes in float32, and its head is
    trained in bfloat16 where the CPU gains from it.
    """
    if is_half(model):
        return torch.autocast(model.spec.device.type, model.spec.dtype)
    if model.spec.engine == "native" and multiplies_bfloat16_faster():
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()


@cache
def multiplies_bfloat16_faster() -> bool:
    """Return whether this CPU multiplies matrices of bfloat16 much faster than of float32."""
    seconds = dict[torch.dtype, float]()
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        times = list[float]()
        for _ in range(4):
            started = perf_counter()
            left @ right
            times.append(perf_counter() - started)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] < 0.7 * seconds[torch.float32]
