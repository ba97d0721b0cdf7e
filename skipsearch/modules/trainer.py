"""Training a draft's own weights towards what the full model says, on the draft's own rows; the model's weights are never touched.

The loss is cross-entropy towards the full model's distribution at a temperature, of which its likeliest tokens carry nearly all:
distillation (Hinton et al. 2015) of a model into a part of itself. AdamW; the rate warms up and falls as a cosine over the steps or the
time there is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from skipsearch.errors import ModuleError
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.processes import ALONE, Processes
from skipsearch.modules.pupils import Pupil
from skipsearch.modules.rows import head_rows

KEEP_EVERY = 30.0      # seconds between two checkpoints: what a kill loses at most, and the step that is under way
WARM_UP = 20           # steps
CLIP = 1.0             # norm of the gradient
SMOOTH = 0.95          # of the shown loss and agreement


@dataclass(frozen=True)
class Settings:
    """steps, seconds: whichever comes first ends the training; None is no limit. batch: texts of a step. likeliest: of the full model's
    tokens, those that are taught. uses: steps that learn from one reading of the full model, which is half of what a step would take; not
    one behind the other, and with drafts that start elsewhere. temperature: at which the full model's distribution is taught. Greedy
    drafts learn more from a sharp one, drafts of samples from that which they are sampled at.
    """

    steps: int | None = None
    seconds: float | None = 600.0
    batch: int = 16
    rate: float = 3e-3
    likeliest: int = 64
    uses: int = 3
    temperature: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """How far a training is. loss: nats; agreement: share of rows that name the full model's token; both smoothed. left: seconds."""

    done: int
    loss: float
    agreement: float
    seconds: float
    left: float
    share: float


class Trainer:
    """One training. texts: [N, T] token ids on the CPU. The pupil's model is in the dtype that its passes are computed in.

    together: processes that each learn from a part of every step's texts, `settings.batch` of them. Steps are those of one process that has
    as many texts as all of them.
    Raises: ModuleError for texts too short to draft on.
    """

    def __init__(self, pupil: Pupil, texts: Tensor, settings: Settings, together: Processes = ALONE):
        if texts.ndim != 2 or texts.shape[1] < 2 * pupil.ahead or not len(texts):
            raise ModuleError(f"there is too little text to train on ({texts.numel()} tokens): give more with --data")
        self.pupil, self.texts, self.settings, self.together = pupil, texts, settings, together
        self.parameters = pupil.parameters
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.done, self.seconds, self.rows, self.loss, self.agreement = 0, 0.0, 0, 0.0, 0.0
        self._readings: dict[int, Any] = {}

    @property
    def fingerprint(self) -> str:
        """Equal for trainings of which one may go on from another's checkpoint: all but how long they last is the same."""
        facts = {k: v for k, v in asdict(self.settings).items() if k not in ("steps", "seconds")}
        spec = self.pupil.model.spec
        facts |= self.pupil.facts | {"batch": self._texts_of_a_step, "model": spec.weights_sha256 or spec.id, "dtype": spec.dtype_name,
                                     "texts": hashlib.sha256(self.texts.numpy().tobytes()).hexdigest()}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def run(self, checkpoint: Path | None = None, listen: Callable[[Step], None] = lambda step: None) -> None:
        """Steps until the limit. checkpoint: a file that the training is kept in meanwhile, and taken up from where it holds this one."""
        if not self.together.agree(self.fingerprint):
            raise ModuleError("the processes of this training do not begin with the same: give all of them the same --data, and a mask by "
                              "--profile or --start")
        if checkpoint is not None and checkpoint.exists():
            self.restore(checkpoint)
        self.together.wait()
        kept = perf_counter()
        share = self._share()
        while share < 1:
            began = perf_counter()
            self.step(share)
            self.seconds += perf_counter() - began
            share = self._share()
            listen(Step(self.done, self.loss, self.agreement, self.seconds, self.seconds * (1 / share - 1), share))
            if checkpoint is not None and self.together.is_main and perf_counter() - kept > KEEP_EVERY:
                self.keep(checkpoint)
                kept = perf_counter()
        if checkpoint is not None and self.together.is_main:
            self.keep(checkpoint)

    def step(self, share: float) -> None:
        """One step of the optimizer. share: of the training that is over."""
        settings = self.settings
        first = int(torch.randint(self.pupil.ahead, (), generator=self._random(self.done)))
        with precision(self.pupil.model):
            loss, right, rows = self.gradients(self._reading(), first)
        self.together.average([parameter.grad for parameter in self.parameters.values() if parameter.grad is not None])
        clip_grad_norm_(self.parameters.values(), CLIP)
        rate = settings.rate * min(1.0, (self.done + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss):
            raise ModuleError(f"the loss is {loss} at step {self.done}: train with a lower --rate than {settings.rate:g}")
        mix = SMOOTH if self.done else 0.0
        self.loss, self.agreement = mix * self.loss + (1 - mix) * loss, mix * self.agreement + (1 - mix) * right
        self.done += 1
        self.rows += rows * self.together.count

    def _reading(self) -> Any:
        """For this step. Steps take turns with the last few readings, so that two of them in a row seldom see the same texts."""
        newest, turn = divmod(self.done, self.settings.uses)
        wanted = max(0, newest - turn)
        self._readings = {n: reading for n, reading in self._readings.items() if n > newest - self.settings.uses}
        if wanted not in self._readings:
            chosen = torch.randint(len(self.texts), (self._texts_of_a_step,), generator=self._random(wanted))
            chosen = chosen.view(self.together.count, -1)[self.together.rank]
            texts = self.texts[chosen].long().to(self.pupil.model.spec.device)
            self._readings[wanted] = self.pupil.read(texts, self.settings.likeliest)
        return self._readings[wanted]

    def _random(self, number: int) -> torch.Generator:
        """Of a step or a reading, so that a checkpoint needs no state of it."""
        return torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)

    @property
    def read(self) -> int:
        """Tokens of text that the full model has read."""
        return -(-self.done // self.settings.uses) * self._texts_of_a_step * self.texts.shape[1]

    @property
    def _texts_of_a_step(self) -> int:
        """Of all processes."""
        return self.settings.batch * self.together.count

    def gradients(self, reading: Any, first: int) -> tuple[float, float, int]:
        """(loss, agreement, rows) of what was read; gradients are added to the parameters'. A few rows of logits are held at a time."""
        states, taught_here = self.pupil.rows(reading, first)
        flat = states.detach().flatten(0, 1).requires_grad_()
        tokens = taught_here.tokens.flatten(0, 1)
        shares = (taught_here.shares.flatten(0, 1).log() / self.settings.temperature).softmax(dim=-1)
        total, right, most = 0.0, 0, head_rows(self.pupil.model)
        for at in range(0, len(flat), most):
            logits = self.pupil.head(flat[None, at:at + most])[0].float()
            taught = logits.gather(-1, tokens[at:at + most])
            loss = (logits.logsumexp(dim=-1) - (shares[at:at + most] * taught).sum(dim=-1)).sum() / len(flat)
            loss.backward()
            total += float(loss.detach())
            right += int((logits.argmax(dim=-1) == tokens[at:at + most, 0]).sum())
        states.backward(flat.grad.view_as(states))   # type: ignore[union-attr]
        return total, right / len(flat), len(flat)

    def tensors(self) -> dict[str, Tensor]:
        """What a module stores, by name, in bfloat16 where the model's passes are and as trained elsewhere."""
        dtype = torch.bfloat16 if half(self.pupil.model) else self.pupil.model.spec.dtype
        return {name: parameter.detach().to(dtype) for name, parameter in self.parameters.items()}

    def keep(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all. Raises: ModuleError."""
        unfinished = path.with_name(f"{path.name}.half")
        try:
            torch.save({"fingerprint": self.fingerprint, "parameters": {n: p.detach() for n, p in self.parameters.items()},
                        "optimizer": self.optimizer.state_dict(), "done": self.done, "seconds": self.seconds, "rows": self.rows,
                        "loss": self.loss, "agreement": self.agreement}, unfinished)
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:
            raise ModuleError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}; choose another --out") from None

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint. Raises: ModuleError for one that is damaged or of another training."""
        try:
            kept: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            same = kept["fingerprint"] == self.fingerprint
        except Exception:   # torch names no error of its own for a file that is none of its
            raise ModuleError(f"{path}: this checkpoint is damaged: remove it, or start again with --force") from None
        if not same:
            raise ModuleError(f"{path} holds another training (another model, text, mask or other settings): give its settings to go on, "
                              "another --out, or --force to start again")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(kept["parameters"][name])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.done, self.seconds, self.rows = kept["done"], kept["seconds"], kept["rows"]
        self.loss, self.agreement = kept["loss"], kept["agreement"]

    def _share(self) -> float:
        """Of the training that is over."""
        steps, seconds = self.settings.steps, self.settings.seconds
        return self.together.main_says(max(self.done / steps if steps else 0.0, self.seconds / seconds if seconds else 0.0))


def half(model: ModelAdapter) -> bool:
    """Whether its passes are computed in 16 bits."""
    return model.spec.dtype in (torch.bfloat16, torch.float16)


def precision(model: ModelAdapter) -> AbstractContextManager[Any]:
    """Trained weights are kept in float32 and multiplied in the dtype of the model."""
    return torch.autocast(model.spec.device.type, model.spec.dtype) if half(model) else nullcontext()
