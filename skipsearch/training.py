"""The driver of a training, from text to a module.

    text      read from files, from a task's calibration prompts, or written by the model itself; some of it is kept aside
    lessons   of a mask's kept sub-layers (a profile's mask, or the thin one with which the untrained draft does best), or of an adapter
    train     towards the full model's distribution, on the draft's own rows (`modules/trainer.py`)
    replay    α before and after, on text that was kept aside
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.errors import ModuleError, SearchError
from skipsearch.evaluation.prompts import workload
from skipsearch.evaluation.replay import Replay
from skipsearch.evaluation.trained import trained_draft
from skipsearch.machine import make_folder, this_machine
from skipsearch.mask import SkipMask
from skipsearch.models import variants
from skipsearch.models.families import FAMILIES
from skipsearch.models.hf import HFAdapter
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.card import Card, Trained
from skipsearch.modules.files import reference, sha256
from skipsearch.modules.processes import ALONE, Processes
from skipsearch.modules.pupils import AdaptedPupil, KangarooPupil, Pupil, S3DPupil, agreement
from skipsearch.modules.rows import head_rows
from skipsearch.modules.text import documents, windows, written
from skipsearch.modules.thin import pruned, thin_mask
from skipsearch.modules.trainer import Settings, Step, Trainer, precision
from skipsearch.modules.weights import adapted, base_of, check_card, load_tensors, save_module
from skipsearch.search import Noted, Progress, Stage
from skipsearch.tasks.values import Task

LENGTH = 256          # tokens of a window, or half of the model's context where that is less
ASIDE = 16            # one window in so many is never trained on
MOST_ASIDE = 64
THIN_ON = 16          # windows that a mask is chosen on
SELF_TOKENS = 400_000
KEPT_SHARE = 8        # a thin mask keeps one sub-layer in so many
REPLAYED, REPLAYED_TOKENS = 24, 48   # prompts, and tokens behind each
CHECKPOINT = "training.pt"

Event = Stage | Progress | Noted | Step
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Text:
    """windows: [N, T] to train on; aside: [M, T], never trained on. what, licence: for the card."""

    windows: Tensor
    aside: Tensor
    what: str
    licence: str


@dataclass(frozen=True)
class Result:
    """alpha: by fast replay on text kept aside, (before, after), None where that ends at once. path: of the module."""

    path: Path
    card: Card
    parameters: int
    extra_bytes: int
    alpha: tuple[float | None, float | None]


def read_text(model: ModelAdapter, data: list[Path], task: Task | None, own: bool, seed: int, listen: Listener,
              tokens: int = SELF_TOKENS, temperature: float = 1.0, licence: str = "not stated") -> Text:
    """Windows of text. own: the model writes them, from the data's beginnings or a task's, or from nothing.

    A task gives its calibration prompts alone, and data that hold one of its hold-out prompts are refused. Raises: ModuleError, TaskError.
    """
    spec = model.spec
    length = LENGTH if spec.context is None else min(LENGTH, spec.context // 2)
    said = []
    if data:
        listen(Stage("reading text"))
        texts = [text for path in data for text in documents(path)]
        if task is not None:
            _refuse_holdout(task, texts)
        found = windows(model.tokenizer, texts, length, spec.eos_token_ids)
        said.append(f"{', '.join(path.name for path in data)}")
    elif task is not None:
        prompts = workload(model, task, task.calibration).prompts
        start = min(length // 2, max(map(len, prompts)))
        found = torch.tensor([prompt[-start:] for prompt in prompts if len(prompt) >= start], dtype=torch.int32)
        said.append(f"calibration prompts of task {task.name}")
    else:
        first = spec.eos_token_ids[0] if spec.eos_token_ids else 0
        found = torch.full((max(1, tokens // length), 1), first, dtype=torch.int32)
    if own or not data:
        listen(Stage("the model writes text for itself"))
        begins = found[:, :length // 2]
        begins = begins.repeat(max(1, -(-tokens // (length * len(begins)))), 1)[:max(1, tokens // length)]
        random = torch.Generator().manual_seed(seed)
        begins = begins[torch.randperm(len(begins), generator=random)]
        texts_of_own = written(model, begins, length, temperature, seed, lambda done, total: listen(Progress(done, total)))
        said.append(f"continued by {spec.id} itself at temperature {temperature:g}")
        found = torch.cat([found, texts_of_own]) if data else texts_of_own
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    found = found[order]
    aside = min(MOST_ASIDE, max(1, len(found) // ASIDE))
    if len(found) < 2:
        raise ModuleError(f"the text fills {len(found)} window of {length} tokens, and one is kept aside: give more of it")
    return Text(found[aside:], found[:aside], "; ".join(said), licence)


def _refuse_holdout(task: Task, texts: list[str]) -> None:
    """Raises: ModuleError if a hold-out prompt stands in the text: what is measured there later would mean nothing."""
    whole = "\n".join(texts)
    for prompt in task.holdout:
        if prompt.text.strip() and prompt.text.strip() in whole:
            raise ModuleError(f"hold-out prompt {prompt.id} of task {task.name} stands in this text, so what is measured there later would "
                              "mean nothing: take other text")


def memory_limit(extra: str, model_bytes: int) -> int:
    """`10%` of the model's weights, `200MB`, `2GB`: bytes. Raises: ModuleError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|MB|GB|MiB|GiB)", extra.strip())
    if not match:
        raise ModuleError(f"--extra-memory {extra!r} is no amount of memory: write 10%, 200MB or 2GB")
    unit = {"%": model_bytes / 100, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}[match[2]]
    return int(float(match[1]) * unit)


@dataclass(frozen=True)
class Lessons:
    """What is to be trained. card: of its module, less how it was trained. name: of its file. extra_bytes: memory that a draft takes.

    begun: what it goes on from, for the card.
    """

    pupil: Pupil
    card: dict[str, Any]
    name: str
    extra_bytes: int
    begun: str = ""


def adapted_lessons(model: ModelAdapter, text: Text, mask: SkipMask | None = None, keep: int | None = None, rank: int | None = None,
                    ahead: int = 5, seed: int = 0, listen: Listener = lambda event: None, start: Path | None = None) -> Lessons:
    """The kept sub-layers of a mask; None looks for a thin one that keeps `keep` of them, an eighth if None. rank: of low-rank changes.

    start: a module to go on from; its mask loses the sub-layers that it misses least, down to `keep`.
    Raises: ModuleError, ModelError.
    """
    base = _unmodified(model)
    begun: dict[str, Tensor] = {}
    if start is not None:
        mask, begun = _begun(base, text, start, keep, rank, ahead, listen)
    if mask is None:
        count = keep or max(1, 2 * model.spec.n_layers // KEPT_SHARE)
        if not 1 <= count < 2 * model.spec.n_layers:
            raise ModuleError(f"--keep {count} is no thin mask of {2 * model.spec.n_layers} sub-layers: keep at least 1 and leave some out")
        listen(Stage(f"choosing {count} sub-layers to keep"))
        mask = thin_mask(model, text.aside[:THIN_ON], count, lambda done, total: listen(Progress(done, total)))
    kept = variants.kept(mask)
    values = sum(weight.numel() for i, kind in kept for weight in variants.weights_of(base, i, kind).values())   # low-rank ones are merged
    card = {"kind": "adapted", "attn": mask.attn, "mlp": mask.mlp, "form": "copy" if rank is None else "lora", "rank": rank}
    name = f"adapted-{len(kept)}{'' if rank is None else f'-lora{rank}'}.safetensors"
    listen(Noted(f"trained: {', '.join(f'{kind} {i}' for i, kind in kept)}"))
    pupil = AdaptedPupil(base, mask, rank, ahead, seed)
    if start is not None:
        pupil.go_on_from(begun, sha256(start))
    return Lessons(pupil, card, name, values * model.spec.dtype.itemsize, "" if start is None else f"from {start.name} on: ")


def _begun(base: HFAdapter, text: Text, start: Path, keep: int | None, rank: int | None, ahead: int,
           listen: Listener) -> tuple[SkipMask, dict[str, Tensor]]:
    """(the mask to train, the tensors to begin with) of a module of the same form. Raises: ModuleError."""
    card, tensors = load_tensors(start)
    check_card(card, "adapted", base.spec, str(start))
    if (card.rank, card.form) != (rank, "copy" if rank is None else "lora"):
        form = f"low-rank changes of rank {card.rank}" if card.rank else "whole copies"
        raise ModuleError(f"{start} has {form}, and goes on as that: {f'give --rank {card.rank}' if card.rank else 'leave --rank out'}")
    mask, kept = card.mask, 2 * card.mask.n_layers - card.mask.n_skipped
    if keep is not None and keep > kept:
        raise ModuleError(f"--keep {keep} is more than the {kept} sub-layers that {start} has")
    if keep is not None and keep < kept:
        listen(Stage(f"choosing {keep} of {kept} sub-layers to keep"))
        mask = pruned(base, adapted(base, card, tensors, str(start)), mask, text.aside[:THIN_ON], keep, ahead,
                      lambda done, total: listen(Progress(done, total)))
    return mask, tensors


def kangaroo_lessons(model: ModelAdapter, exit_layer: int, form: str = "attention") -> Lessons:
    """An adapter behind the first `exit_layer` layers. form: `attention` or `layer`. Raises: ModuleError, ModelError."""
    n = model.spec.n_layers
    if not 1 <= exit_layer < n:
        raise ModuleError(f"--exit-layer {exit_layer} is no place to leave a model of {n} layers early: give 1 to {n - 1}")
    pupil = KangarooPupil(_unmodified(model), exit_layer, form)
    above = tuple(range(exit_layer, n))
    card = {"kind": "kangaroo", "attn": above, "mlp": above, "form": form, "rank": None, "exit_layer": exit_layer}
    values = sum(parameter.numel() for parameter in pupil.parameters.values())
    return Lessons(pupil, card, f"kangaroo-{exit_layer}{'' if form == 'attention' else '-layer'}.safetensors",
                   values * model.spec.dtype.itemsize)


def s3d_lessons(model: ModelAdapter, keep: int | None = None, ahead: int = 4, rank: int | None = None, seed: int = 0) -> Lessons:
    """Embeddings for unknown tokens over a mask that leaves out the middle layers, as the paper's best ones do; a rank trains low-rank
    changes of the kept sub-layers too. keep: layers, a third of them if None. Raises: ModuleError, ModelError."""
    n = model.spec.n_layers
    count = keep or max(2, n // 3)
    if not 2 <= count < n or not 2 <= ahead <= 16:
        raise ModuleError(f"--keep {count} and --ahead {ahead}: s3d keeps 2 to {n - 1} of {n} layers and drafts 2 to 16 tokens at once")
    middle = tuple(range((count + 1) // 2, n - count // 2))
    mask = SkipMask.whole_layers(n, middle)
    pupil = S3DPupil(_unmodified(model), mask, ahead, rank, seed)
    kept = variants.kept(mask) if rank else []
    values = (ahead - 1) * model.spec.hidden
    values += sum(weight.numel() for i, kind in kept for weight in variants.weights_of(pupil.model, i, kind).values())
    card = {"kind": "s3d", "attn": middle, "mlp": middle, "form": "lora" if rank else "embeddings", "rank": rank}
    return Lessons(pupil, card, f"s3d-{ahead}{f'-lora{rank}' if rank else ''}.safetensors", values * model.spec.dtype.itemsize)


def train(lessons: Lessons, text: Text, out: Path, settings: Settings, extra_memory: str = "25%", listen: Listener = lambda event: None,
          anew: bool = False, together: Processes = ALONE) -> Result | None:
    """Train what a draft needs, and write it to a folder as a module.

    anew: throw away a training that was interrupted in this folder, instead of going on with it. together: processes that train it, each
    of which calls this; None in all but the main one. Raises: ModuleError.
    """
    pupil = lessons.pupil
    model = pupil.model
    if lessons.extra_bytes > memory_limit(extra_memory, model.weight_bytes):
        raise ModuleError(f"what this draft has of its own takes {lessons.extra_bytes / 1e6:.3g} MB, more than --extra-memory "
                          f"{extra_memory}: train less, or allow more")
    make_folder(out)
    checkpoint = out / CHECKPOINT
    if anew and together.is_main:
        checkpoint.unlink(missing_ok=True)
    together.wait()
    trainer = Trainer(pupil, text.windows, settings, together)
    before = measured(pupil, text)
    listen(Stage(f"training {sum(p.numel() for p in trainer.parameters.values()) / 1e6:.3g} M values"))
    trainer.run(checkpoint, listen)
    if not together.is_main:
        return None
    trained = Trained(text=(lessons.begun + text.what)[:300], licence=text.licence[:300], tokens=trainer.read,
                      rows=trainer.rows, steps=trainer.done, seconds=round(trainer.seconds, 1), seed=settings.seed,
                      device=this_machine(model.spec.device).description[:300], dtype=model.spec.dtype_name,
                      created=datetime.now(UTC).isoformat(timespec="seconds"), before=before, after=measured(pupil, text))
    card = Card(**lessons.card, base=base_of(model.spec), trained=trained)
    path = out / lessons.name
    save_module(path, card, trainer.tensors())
    checkpoint.unlink(missing_ok=True)
    listen(Stage("replaying text that was kept aside"))
    ref = reference(path, path.name)
    return Result(path, card, ref.parameters, lessons.extra_bytes, _alpha(model, path, lessons.card, text))


def measured(pupil: Pupil, text: Text) -> float:
    """Share of the rows of text kept aside on which the draft and the full model agree."""
    with precision(pupil.model):
        return round(agreement(pupil, text.aside, head_rows(pupil.model)), 4)


def _alpha(model: ModelAdapter, path: Path, card: dict[str, Any], text: Text) -> tuple[float | None, float | None]:
    """By fast replay: of the mask as it is (an early exit without its adapter drafts with the head alone), and of the module."""
    prompts = [row[:len(row) // 2].tolist() for row in text.aside[:REPLAYED]]
    try:
        replay = Replay(model, prompts, REPLAYED_TOKENS, 6)
    except SearchError:   # the model ends all of them at once
        return None, None
    draft = trained_draft(model, reference(path, path.name), [path.parent])
    return replay.acceptance(SkipMask(model.spec.n_layers, card["attn"], card["mlp"])), draft.alpha(replay)


def _unmodified(model: ModelAdapter) -> HFAdapter:
    if not isinstance(model, HFAdapter):
        if model.spec.family not in FAMILIES:
            raise ModuleError(f"drafts are trained on families of the table, and {model.spec.id}, a {model.spec.family} model, is read "
                              "from itself: tune a mask for it instead; `skipsearch list models` shows the table")
        raise ModuleError("training runs on the unmodified modules: load the model with --engine hf")
    return model


def limited(settings: Settings, steps: int | None, seconds: float | None) -> Settings:
    """With the limits that were asked for; ten minutes where none was."""
    return replace(settings, steps=steps, seconds=600.0 if steps is None and seconds is None else seconds)
