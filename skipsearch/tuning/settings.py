"""The settings of a search, checked before any work is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from skipsearch.core.registry import unknown_name
from skipsearch.core.sizes import parse_bytes
from skipsearch.errors import SearchError
from skipsearch.models.adapter import ModelSpec
from skipsearch.searchers import searcher_names
from skipsearch.tasks import Task
from skipsearch.tuning.profile_builder import require_hashes
from skipsearch.tuning.recipe_shape import (
    DRAFT_MODEL,
    ONLINE_DRAFTERS,
    RECIPE_SHAPES,
    TRAINED_DRAFTERS,
    RecipeShape,
)

DEFAULT_SEARCHER = "auto"
# If neither is given, a run ends after the first of the two: masks, and seconds in all.
DEFAULT_TRIALS, DEFAULT_BUDGET_S = 200, 600.0


@dataclass(frozen=True)
class TuneSettings:
    """The arguments of `tune`. Raises: SearchError if one of them makes no sense."""

    searcher: str
    max_trials: int | None  # masks to judge; None: only the time is limited
    budget_s: float | None  # seconds of all stages; None: only the masks are limited
    objective: str  # "replay" or "wall"
    seed: int
    whole_layers: bool  # whether attention and MLP of a layer are skipped only together
    drafters: str  # a key of RECIPE_SHAPES
    never_skip: frozenset[int]  # flat numbers of sub-layers
    modules: Path | None  # the folder of modules
    remeasure: bool  # whether a cached latency table is ignored
    draft_memory: int | None = None  # bytes that a copy of the weights may take; None: no limit
    has_draft_models: bool = False  # whether second models may draft

    def __post_init__(self) -> None:
        if self.max_trials is not None and self.max_trials < 1:
            raise SearchError(f"trials is {self.max_trials}; judge at least 1 mask")
        check_objective(self.objective)
        if self.seed < 0:
            raise SearchError(f"seed is {self.seed}; a seed is a whole number from 0 up")
        check_searcher(self.searcher)
        check_drafters(self.drafters, self.modules, self.has_draft_models)

    @property
    def shape(self) -> RecipeShape | None:
        """The shape of every recipe; None for `auto`."""
        return None if self.drafters == "auto" else RecipeShape.parse(self.drafters)

    @property
    def kind(self) -> str | None:
        """The drafter of every recipe; None for `auto`."""
        return None if self.shape is None else self.shape.kind

    @property
    def chooses_masks_online(self) -> bool:
        return self.kind in ONLINE_DRAFTERS

    @property
    def searches_masks(self) -> bool:
        return self.kind in (None, "skip")

    def check_model(self, spec: ModelSpec) -> None:
        """Raise SearchError if these settings do not fit the model."""
        require_hashes(spec)
        if spec.is_recurrent and self.chooses_masks_online:
            raise SearchError(
                f"--drafters {self.drafters}: {self.kind} reads hidden states while it decodes, "
                f"and {spec.id}, whose layers keep a recurrent state, shows none; tune skip or "
                "lookup"
            )


def parse_duration(budget: str | float | None) -> float | None:
    """Return the seconds of `20m`, `90s`, `1.5h` or a number. Raises: SearchError."""
    if budget is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(budget).strip())
    value = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not value > 0:
        raise SearchError(f"budget {budget!r} is not a time: write 90s, 20m or 1.5h")
    return value


def parse_draft_memory(text: str | None) -> int | None:
    """Return the bytes of `2GB`; None -> None. Raises: SearchError."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise SearchError(f"--draft-memory {error}") from None


def parse_sublayers(text: str | None) -> frozenset[int]:
    """Return the flat numbers of sub-layers: `attn:0,mlp:3` -> {0, 7}; None -> {}.

    Raises: SearchError.
    """
    numbers = set()
    for part in (text or "").split(",") if text else []:
        match = re.fullmatch(r"(attn|mlp):(\d{1,5})", part.strip())
        if match is None:
            raise SearchError(
                f"{part.strip()!r} names no sub-layer: write attn:0 for the attention of layer 0, "
                "mlp:3 for the MLP of layer "
                "3, with commas between them"
            )
        numbers.add(2 * int(match[2]) + (match[1] == "mlp"))
    return frozenset(numbers)


def check_searcher(name: str) -> None:
    """Raise SearchError if there is no such searcher."""
    if name not in searcher_names():
        raise SearchError(unknown_name("searcher", name, searcher_names()))


def check_objective(name: str) -> None:
    """Raise SearchError if there is no such objective."""
    if name not in ("replay", "wall"):
        raise SearchError(f"there is no objective {name!r}; use replay or wall")


def check_drafters(name: str, modules: Path | None = None, has_draft_models: bool = False) -> None:
    """Raise SearchError if `name` is no choice of drafters, or if its weights are missing."""
    if name not in RECIPE_SHAPES:
        reversed_name = ",".join(reversed([kind.strip() for kind in name.split(",")]))
        raise SearchError(
            f"--drafters {name}: lookup stands before the other drafter; write --drafters "
            f"{reversed_name}"
            if reversed_name in RECIPE_SHAPES
            else unknown_name("choice of drafters", name, RECIPE_SHAPES)
        )
    kind = RecipeShape.parse(name).kind
    # A model may ship a head for mtp, so that is checked after loading the model.
    if kind in TRAINED_DRAFTERS and kind != "mtp" and modules is None:
        raise SearchError(
            f"--drafters {name} drafts with trained weights: name the folder of what `skipsearch "
            f"train {kind}` made with "
            "--modules"
        )
    if kind == DRAFT_MODEL and not has_draft_models:
        raise SearchError(
            f"--drafters {name} drafts with a second model: name one or several with --draft-models"
        )


def check_task(task: Task) -> None:
    """Raise SearchError if the task's generations are too short for a draft."""
    # The prefill yields the first token, and a round with one token left drafts nothing.
    if task.max_new_tokens < 3:
        raise SearchError(
            f"task {task.name} generates {task.max_new_tokens} tokens, too few to draft any: let "
            "it generate at least 3"
        )
    if not task.calibration or not task.holdout:
        raise SearchError(
            f"task {task.name} has {len(task.calibration)} prompts to search on and "
            f"{len(task.holdout)} to measure on: "
            "it needs some of both"
        )
