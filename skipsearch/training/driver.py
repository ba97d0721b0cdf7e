"""The driver of a training, from text to a module (a file of trained weights).

text      read from files, from a task's calibration prompts, or written by the model; a part of it
          is kept for validation; for a draft head, with the full model's hidden states
          (`training/head_text.py`)
plan      choose a student: the kept sub-layers of a mask, an adapter after an early exit, or
          mask-token embeddings; the mask is a profile's, or the one whose untrained draft agrees
          most often with the full model
train     towards the full model's distribution, at the rows that draft passes compute
          (`training/trainer.py`)
replay    α before and after, on the validation text
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from skipsearch.core.files import make_private_dir
from skipsearch.core.machine import describe_machine
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Vocabulary
from skipsearch.core.sizes import parse_bytes
from skipsearch.drafters.s3d.weights import MASK_EMBEDDINGS
from skipsearch.drafters.trained.card import BlockFormat, ModuleCard, TrainingRecord
from skipsearch.drafters.trained.module_files import hash_module_file, make_reference
from skipsearch.drafters.trained.module_weights import (
    apply_module,
    check_card,
    load_module,
    make_base,
    pack_matrices,
    save_module,
    unpack_matrices,
)
from skipsearch.engine.native import NativeAdapter
from skipsearch.errors import ModuleError, SearchError
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.families.table import FAMILIES
from skipsearch.replay.replay import Replay
from skipsearch.replay.trained_replay import TrainedDraft, load_trained_draft
from skipsearch.training.corpus import Corpus
from skipsearch.training.distill_batch import TeacherTargets, max_head_rows
from skipsearch.training.draft_head_student import DraftHeadStudent, HeadLesson, choose_vocabulary
from skipsearch.training.feature_file import FeatureFile, remove_features
from skipsearch.training.head_text import PACKED_TOKENS, HeadRequests, TextLimits, collect_text
from skipsearch.training.mask_selection import prune_mask, select_mask
from skipsearch.training.students import (
    AdaptedStudent,
    KangarooStudent,
    S3DStudent,
    Student,
    token_agreement,
)
from skipsearch.training.trainer import Trainer, TrainProgress, TrainSettings, make_autocast
from skipsearch.tuning.events import Notice, StageProgress, StageStarted

# Windows of text on which a mask is chosen, as many as have this many logits. Each of hundreds of
# masks computes all of them.
MIN_SELECTION_WINDOWS, MAX_SELECTION_WINDOWS = 4, 16
MASK_SELECTION_LOGITS = 2**25
DRAFT_ONE_IN = 8  # a chosen mask keeps one sub-layer in this many
REPLAY_PROMPTS, REPLAY_TOKENS = 24, 48  # prompts, and tokens after each
DEFAULT_HEAD_TOKENS = 8000  # tokens that a head is trained to draft
PROBE_TOKENS = 256  # on which the speed of a head's training is measured
FIRST_REPORT_S = 120.0  # of training, until α of a head is reported; then at each doubling
CHECKPOINT = "training.pt"
T = TypeVar("T")

TrainEvent = StageStarted | StageProgress | Notice | TrainProgress
TrainListener = Callable[[TrainEvent], None]


@dataclass(frozen=True)
class TrainingResult:
    """A trained module and its figures."""

    path: Path  # of the module
    card: ModuleCard
    n_parameters: int
    extra_bytes: int  # memory that the draft needs in addition to the model
    # (before, after), by replay of the validation text; None if the model continues none of it
    alpha: tuple[float | None, float | None]


def parse_memory_limit(extra: str, model_bytes: int) -> int:
    """Return the bytes of `10%` (of the model's weights), `200MB` or `2GB`. Raises: ModuleError."""
    try:
        return parse_bytes(extra, model_bytes)
    except ValueError as error:
        raise ModuleError(f"--extra-memory {error}") from None


@dataclass(frozen=True)
class TrainingPlan:
    """A student, and the data that is needed to train it and to write its module."""

    student: Student
    start: StartModule | None = None


def plan_adapted(
    model: ModelAdapter,
    corpus: Corpus,
    mask: SkipMask | None = None,
    draft_sublayers: int | None = None,
    rank: int | None = None,
    draft_tokens: int = 5,
    seed: int = 0,
    on_event: TrainListener = lambda event: None,
    init_from: Path | None = None,
) -> TrainingPlan:
    """Plan to train the kept sub-layers of a mask.

    mask: the mask of the draft; None: choose a mask that keeps `draft_sublayers` sub-layers.
    draft_sublayers: number of sub-layers that the draft keeps; None: an eighth of all sub-layers.
    rank: train low-rank updates of this rank; None: train copies of the sub-layers.
    init_from: the file of a module to start from, whose mask replaces `mask`. If it has more than
    `draft_sublayers` sub-layers, those that its draft needs least are dropped.
    Raises: ModuleError for arguments that do not fit the model or the module; ModelError for a
    model whose sub-layers cannot be trained.
    """
    base, start = _require_hf(model), _load_start(model, "adapted", init_from)
    if start is not None:
        mask = _start_mask(base, corpus, start, draft_sublayers, rank, draft_tokens, on_event)
    if mask is None:
        count = draft_sublayers or max(1, 2 * model.spec.n_layers // DRAFT_ONE_IN)
        if not 1 <= count < 2 * model.spec.n_layers:
            raise ModuleError(
                f"--draft-sublayers {count} is no thin mask of {2 * model.spec.n_layers} "
                "sub-layers: keep at least 1 and leave some out"
            )
        on_event(StageStarted(f"choosing {count} sub-layers to keep"))
        mask = select_mask(
            model,
            _take_selection_windows(corpus, model.spec.vocab_size),
            count,
            lambda done, total: on_event(StageProgress(done, total)),
        )
    names = ", ".join(f"{kind} {i}" for i, kind in weight_overlay.kept_sublayers(mask))
    on_event(Notice(f"trained: {names}"))
    return _plan_from(AdaptedStudent(base, mask, rank, draft_tokens, seed), start)


def _take_selection_windows(corpus: Corpus, vocab_size: int) -> Tensor:
    """Return the validation windows [N, T] on which masks are compared."""
    count = MASK_SELECTION_LOGITS // (corpus.validation.shape[1] * vocab_size)
    return corpus.validation[: max(MIN_SELECTION_WINDOWS, min(MAX_SELECTION_WINDOWS, count))]


@dataclass(frozen=True)
class StartModule:
    """A module that a training continues from."""

    path: Path
    card: ModuleCard
    tensors: dict[str, Tensor]

    def read_option(self, option: str, given: T | None, stored: T) -> T:
        """Return an option's value, which is that of the module.

        given: None if the user left the option out. Raises: ModuleError if it differs.
        """
        if given is not None and given != stored:
            raise ModuleError(
                f"{option} {given} is not what {self.path} was trained with ({stored}): leave "
                f"{option} out, or leave --init-from out"
            )
        return stored


def _load_start(model: ModelAdapter, kind: str, init_from: Path | None) -> StartModule | None:
    """Return the module to continue from; None if `init_from` is None.

    Raises: ModuleError if it cannot be read, is of another kind or for another model.
    """
    if init_from is None:
        return None
    card, tensors = load_module(init_from)
    check_card(card, kind, model.spec, str(init_from))
    return StartModule(init_from, card, tensors)


def _plan_from(student: Student, start: StartModule | None) -> TrainingPlan:
    """Return the plan to train a student, from the weights of a module if there is one.

    Raises: ModuleError if the module lacks a weight, or has it in another shape.
    """
    if start is None:
        return TrainingPlan(student)
    for name, parameter in student.parameters.items():
        stored = start.tensors.get(name)
        if stored is None or stored.shape != parameter.shape:
            shape = "no such tensor" if stored is None else f"one of {tuple(stored.shape)}"
            raise ModuleError(
                f"{start.path}: this draft has a tensor {name} of {tuple(parameter.shape)}, and "
                f"the module {shape}: leave --init-from out"
            )
        with torch.no_grad():
            parameter.copy_(stored)
    student.facts["start"] = hash_module_file(start.path)
    return TrainingPlan(student, start)


def _start_mask(
    base: HFAdapter,
    corpus: Corpus,
    start: StartModule,
    draft_sublayers: int | None,
    rank: int | None,
    draft_tokens: int,
    on_event: TrainListener,
) -> SkipMask:
    """Return the mask to train on from a module.

    If its mask keeps more than `draft_sublayers` sub-layers, the mask is pruned to that number.

    Raises: ModuleError if the module has another rank than `rank` (None: whole copies), or fewer
        than `draft_sublayers` sub-layers.
    """
    card, tensors, init_from = start.card, start.tensors, start.path
    if (card.rank, card.form) != (rank, "copy" if rank is None else "lora"):
        form = f"low-rank changes of rank {card.rank}" if card.rank else "whole copies"
        raise ModuleError(
            f"{init_from} has {form}, and goes on as that: "
            f"{f'give --rank {card.rank}' if card.rank else 'leave --rank out'}"
        )
    mask, n_kept = card.mask, 2 * card.mask.n_layers - card.mask.n_skipped
    if draft_sublayers is not None and draft_sublayers > n_kept:
        raise ModuleError(
            f"--draft-sublayers {draft_sublayers} is more than the {n_kept} sub-layers that "
            f"{init_from} has"
        )
    if draft_sublayers is not None and draft_sublayers < n_kept:
        on_event(StageStarted(f"choosing {draft_sublayers} of {n_kept} sub-layers to keep"))
        mask = prune_mask(
            base,
            apply_module(base, card, tensors, str(init_from)),
            mask,
            _take_selection_windows(corpus, base.spec.vocab_size),
            draft_sublayers,
            draft_tokens,
            lambda done, total: on_event(StageProgress(done, total)),
        )
    return mask


def plan_kangaroo(
    model: ModelAdapter,
    exit_layer: int | None = None,
    form: str | None = None,
    init_from: Path | None = None,
) -> TrainingPlan:
    """Plan to train an adapter after the first `exit_layer` layers.

    exit_layer: None: an eighth of the layers. form: `attention` or `layer`; None: `attention`.
    init_from: the file of a module to start from, whose values these are then. Raises: ModuleError,
    ModelError."""
    n = model.spec.n_layers
    start = _load_start(model, "kangaroo", init_from)
    if start is not None:
        exit_layer = start.read_option("--exit-layer", exit_layer, start.card.exit_layer)
        form = start.read_option("--form", form, start.card.form)
    exit_layer, form = exit_layer or max(1, n // 8), form or "attention"
    if not 1 <= exit_layer < n:
        raise ModuleError(
            f"--exit-layer {exit_layer} is no place to leave a model of {n} layers early: give 1 "
            f"to {n - 1}"
        )
    return _plan_from(KangarooStudent(_require_hf(model), exit_layer, form), start)


def plan_s3d(
    model: ModelAdapter,
    draft_layers: int | None = None,
    draft_tokens: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    init_from: Path | None = None,
) -> TrainingPlan:
    """Plan to train the mask-token embeddings of S3D.

    The mask skips the middle layers, as the paper's best masks do. draft_layers: layers that the
    draft keeps; None: a third of all layers. draft_tokens: None: 4. rank: also train low-rank
    updates of this rank for the kept sub-layers; None: train embeddings alone. init_from: the file
    of a module to start from, whose values these are then. Raises: ModuleError, ModelError.
    """
    n = model.spec.n_layers
    start = _load_start(model, "s3d", init_from)
    if start is not None:
        if MASK_EMBEDDINGS not in start.tensors:
            raise ModuleError(f"{init_from}: this module has no {MASK_EMBEDDINGS}: train a new one")
        kept_layers = n - len(start.card.mask.attn)
        trained_tokens = 1 + len(start.tensors[MASK_EMBEDDINGS])
        draft_layers = start.read_option("--draft-sublayers", draft_layers, kept_layers)
        draft_tokens = start.read_option("--draft-tokens", draft_tokens, trained_tokens)
        rank = start.read_option("--rank", rank, start.card.rank)
    count, draft_tokens = draft_layers or max(2, n // 3), draft_tokens or 4
    if not 2 <= count < n or not 2 <= draft_tokens <= 16:
        raise ModuleError(
            f"--draft-sublayers {count} and --draft-tokens {draft_tokens}: s3d keeps 2 to {n - 1} "
            f"of {n} layers and drafts 2 to 16 tokens at once"
        )
    middle = tuple(range((count + 1) // 2, n - count // 2))
    mask = SkipMask.from_layers(n, middle)
    return _plan_from(S3DStudent(_require_hf(model), mask, draft_tokens, rank, seed), start)


def plan_mtp(
    model: ModelAdapter,
    corpus: Corpus,
    vocabulary_size: int | None = None,
    draft_tokens: int = 3,
    on_event: TrainListener = lambda event: None,
    init_from: Path | None = None,
) -> TrainingPlan:
    """Plan to train a draft head.

    vocabulary_size: tokens that the head is trained to draft; 0: all; None: 8000. draft_tokens:
    draft steps that it is trained on. init_from: the file of a head to start from, which then also
    names the vocabulary. Raises: ModuleError, ModelError.
    """
    base = model if isinstance(model, NativeAdapter) else _require_hf(model)
    start, features = _load_start(model, "mtp", init_from), corpus.features
    if start is not None:
        vocabulary = start.card.vocabulary
        n_tokens = 0 if vocabulary is None else len(vocabulary.token_ids())
        start.read_option("--vocabulary", vocabulary_size, n_tokens)
        return _plan_from(DraftHeadStudent(base, None, vocabulary, draft_tokens, features), start)
    if vocabulary_size is None:
        vocabulary_size = DEFAULT_HEAD_TOKENS
    tokens = corpus.windows.flatten()
    if features is not None:
        known = features.list_rows(tokens)
        tokens = known.tokens[known.starts_round]
    vocabulary = choose_vocabulary(tokens.tolist(), vocabulary_size, model.spec.vocab_size)
    on_event(StageStarted("fitting the head's projection"))
    student = DraftHeadStudent(base, corpus.windows, vocabulary, draft_tokens, features)
    return TrainingPlan(student)


def collect_head_corpus(
    model: ModelAdapter,
    requests: HeadRequests,
    out: Path,
    settings: TrainSettings,
    n_tokens: int,
    draft_tokens: int = 3,
    licence: str = "not stated",
    on_event: TrainListener = lambda event: None,
    restart: bool = False,
) -> tuple[Corpus, TrainSettings]:
    """Write the text of a draft head to a folder; return it and the settings for the time left.

    settings: its seconds are for text, features and training together. n_tokens: the most tokens.
    restart: discard what an interrupted training left. Raises: ModuleError.
    """
    if restart:
        remove_features(out)
        (out / CHECKPOINT).unlink(missing_ok=True)
    if settings.steps is not None:
        n_tokens = min(n_tokens, settings.steps * settings.batch_size * PACKED_TOKENS)
    facts = model.spec.facts() | {"requests": requests.sha256, "top_k": settings.top_k}
    file = FeatureFile(out, facts, model.spec.hidden_size, settings.top_k)
    rate = _measure_training_rate(model, draft_tokens)
    limits = TextLimits(settings.seconds, rate, n_tokens)
    is_complete = (out / CHECKPOINT).exists()
    corpus = collect_text(
        model, requests, file, settings.top_k, limits, licence, on_event, is_complete
    )
    left_s = None if settings.seconds is None else max(1.0, settings.seconds - file.seconds)
    on_event(
        Notice(
            f"{len(file.texts)} texts with {file.n_tokens:,} tokens took {file.seconds:.0f} s; "
            f"training takes {60 * rate:,.0f} tokens a minute"
            + ("" if left_s is None else f" and has {left_s:.0f} s")
        )
    )
    return corpus, replace(settings, seconds=left_s)


def _measure_training_rate(model: ModelAdapter, draft_tokens: int) -> float:
    """Return the tokens of text per second that a training of a draft head reads."""
    base = model if isinstance(model, NativeAdapter) else _require_hf(model)
    size = min(model.spec.vocab_size - 1, DEFAULT_HEAD_TOKENS)
    student = DraftHeadStudent(base, None, Vocabulary(lowest=size, tokens=""), draft_tokens)
    tokens = torch.arange(PROBE_TOKENS, device=model.spec.device)[None] % size
    trainer = Trainer(student, tokens, TrainSettings(steps=1, seconds=None))
    hidden = torch.ones(*tokens.shape, model.spec.hidden_size, dtype=model.spec.dtype)
    targets = TeacherTargets(tokens[..., None], torch.ones(*tokens.shape, 1).to(tokens.device))
    lesson = HeadLesson(tokens, hidden.to(tokens.device), targets)
    for _ in range(2):  # the first run allocates memory
        started = perf_counter()
        with make_autocast(model):
            trainer.accumulate_gradients(lesson, 0)
        rate = PROBE_TOKENS / max(1e-6, perf_counter() - started)
    return rate


def train(
    plan: TrainingPlan,
    corpus: Corpus,
    out: Path,
    settings: TrainSettings,
    extra_memory: str = "25%",
    on_event: TrainListener = lambda event: None,
    restart: bool = False,
    blocks: BlockFormat | None = None,
) -> TrainingResult:
    """Train a draft, and write it to a folder as a module.

    restart: discard an interrupted training in this folder instead of resuming it. blocks: the
    format of the module's matrices; None: as they are trained. Raises: ModuleError."""
    student = plan.student
    model = student.model
    if student.extra_bytes > parse_memory_limit(extra_memory, model.weight_bytes):
        raise ModuleError(
            f"what this draft has of its own takes {student.extra_bytes / 1e6:.3g} MB, more than "
            "--extra-memory "
            f"{extra_memory}: train less, or allow more"
        )
    make_private_dir(out)
    checkpoint = out / CHECKPOINT
    if restart:
        checkpoint.unlink(missing_ok=True)
    trainer = Trainer(student, corpus.windows, settings)
    before = measure_agreement(student, corpus)
    _report_depths(student, corpus, "before the training", on_event)
    on_event(
        StageStarted(
            f"training {sum(p.numel() for p in trainer.parameters.values()) / 1e6:.3g} M values"
        )
    )
    report_at_s = FIRST_REPORT_S

    def on_progress(progress: TrainProgress) -> None:
        nonlocal report_at_s
        on_event(progress)
        if report_at_s <= progress.seconds and progress.share_done < 1:
            _report_depths(student, corpus, f"after {progress.seconds / 60:.0f} min", on_event)
            while report_at_s <= progress.seconds:
                report_at_s *= 2

    trainer.run(checkpoint, on_progress)
    tensors = trainer.export_tensors()
    if blocks is not None:
        tensors = pack_matrices(tensors, blocks)
        trainer.load_tensors(unpack_matrices(tensors, blocks))
    text, earlier = corpus.description, None
    n_read = trainer.tokens_read if corpus.features is None else corpus.features.n_tokens
    if plan.start is not None:
        text, earlier = f"from {plan.start.path.name} on: {text}", plan.start.card.trained
    trained = TrainingRecord(
        text=text[:300],
        licence=corpus.licence[:300],
        tokens=n_read + (earlier.tokens if earlier else 0),
        rows=trainer.n_rows + (earlier.rows if earlier else 0),
        steps=trainer.n_steps + (earlier.steps if earlier else 0),
        seconds=round(trainer.seconds + (earlier.seconds if earlier else 0.0), 1),
        seed=settings.seed,
        device=describe_machine(model.spec.device).description[:300],
        dtype=model.spec.dtype_name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        before=before,
        after=measure_agreement(student, corpus),
    )
    if trained.after < before:
        on_event(
            Notice(
                f"after the training the draft names {trained.after:.3f} of the model's tokens on "
                f"text kept aside, and before it {before:.3f}: give a longer --budget, more text "
                "or a lower --learning-rate"
            )
        )
    card = ModuleCard(**student.card, base=make_base(model.spec), blocks=blocks, trained=trained)
    _report_depths(student, corpus, "after the training", on_event)
    path = out / student.file_name
    save_module(path, card, tensors)
    checkpoint.unlink(missing_ok=True)
    remove_features(out)
    on_event(StageStarted("replaying text that was kept aside"))
    ref = make_reference(path, path.name)
    draft = load_trained_draft(model, ref, [out])
    return TrainingResult(
        path,
        card,
        ref.parameters,
        student.extra_bytes if "stored" in draft.weights else path.stat().st_size,
        _replay_alpha(model, draft, card.mask, corpus),
    )


def measure_agreement(student: Student, corpus: Corpus) -> float:
    """Return the share of rows of the validation text at which draft and full model agree."""
    with make_autocast(student.model):
        return round(token_agreement(student, corpus.validation, max_head_rows(student.model)), 4)


def _report_depths(student: Student, corpus: Corpus, moment: str, on_event: TrainListener) -> None:
    """Report the acceptance of each draft step of a draft head."""
    if isinstance(student, DraftHeadStudent):
        with make_autocast(student.model):
            alpha = student.measure_alpha_by_depth(corpus.validation)
        by_depth = ", ".join(f"{value:.3f}" for value in alpha)
        on_event(Notice(f"α of draft steps 1 to {len(alpha)}, {moment}: {by_depth}"))


def _replay_alpha(
    model: ModelAdapter, draft: TrainedDraft, mask: SkipMask, corpus: Corpus
) -> tuple[float | None, float | None]:
    """Return (α of the untrained mask, α of the trained draft), both by replay.

    An untrained early exit drafts with the head alone, without an adapter. A draft head has no
    untrained mask.
    """
    try:
        replay = Replay(model, corpus.list_prompts(REPLAY_PROMPTS), REPLAY_TOKENS, 6)
    except SearchError:  # the model ends every continuation after one token
        return None, None
    before = None if draft.kind == "mtp" else replay.measure_acceptance(mask)
    return before, draft.measure_alpha(replay)


def _require_hf(model: ModelAdapter) -> HFAdapter:
    if not isinstance(model, HFAdapter):
        if model.spec.family not in FAMILIES:
            raise ModuleError(
                f"drafts are trained on families of the table, and {model.spec.id}, a "
                f"{model.spec.family} model, is read "
                "from itself: tune a mask for it instead; `skipsearch list models` shows the table"
            )
        raise ModuleError(
            "training runs on the unmodified modules: load the model with --engine hf"
        )
    return model


def with_limits(settings: TrainSettings, steps: int | None, limit_s: float | None) -> TrainSettings:
    """Return settings with these limits. If both are None, the limit is ten minutes."""
    return replace(
        settings, steps=steps, seconds=600.0 if steps is None and limit_s is None else limit_s
    )
