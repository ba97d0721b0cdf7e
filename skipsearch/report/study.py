"""A study as a report reads it: every judged mask, the race and the policy surface, and never a byte written.

`Ledger` cannot do this: it opens a study to go on with it, creates what is missing and marks as failed what a killed process left.
What was added to studies later (`searcher`, `search_seconds`, `raced`, `surface`, `brought`, `moved`) may be missing; a figure that needs
it says so. Older studies have a draft policy in words (`policy`) where newer ones have a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from skipsearch.errors import MaskError, SearchError
from skipsearch.ledger import parameter_names
from skipsearch.mask import SkipMask
from skipsearch.report.recorded import MAX_LAYERS, BroughtGroup, Facts, MovedMasks, RacedRecipe, Surface, SurfacePoint, in_words
from skipsearch.stats import Trial
from skipsearch.storage import JOURNAL_START, STUDY, is_url, reason, shown, study_name, with_driver

UNKNOWN = "searcher not recorded"   # the searcher of a trial that does not say who proposed it

@dataclass(frozen=True)
class Judged:
    """A trial that ended with a time and knows what plain decoding took. recipe: what the mask was judged in, in words."""

    trial: Trial
    speedup: float
    recipe: str = ""

    @property
    def searcher(self) -> str:
        return self.trial.searcher or UNKNOWN

    @property
    def half_width(self) -> float:
        """Of the speedup's 95 % interval, from the standard error of its time."""
        return 1.96 * self.speedup * self.trial.stderr / self.trial.seconds_per_token


@dataclass(frozen=True)
class Study:
    """One search. judged: finished trials in their order; left_out: those without a time or a baseline (failed, or abandoned)."""

    label: str
    n_layers: int
    identity: Mapping[str, Any]
    judged: tuple[Judged, ...]
    left_out: int = 0
    raced: tuple[RacedRecipe, ...] = ()
    surface: tuple[SurfacePoint, ...] = ()
    brought: tuple[BroughtGroup, ...] = ()
    moved: MovedMasks | None = None

    @property
    def best(self) -> Judged | None:
        """None where no mask was judged, since what was searched for has none of its own."""
        return max(self.judged, key=lambda j: j.speedup, default=None)

    @property
    def searchers(self) -> tuple[str, ...]:
        """Who proposed something, in order of appearance."""
        return tuple(dict.fromkeys(j.searcher for j in self.judged))

    @property
    def best_so_far(self) -> list[float]:
        return list(accumulate((j.speedup for j in self.judged), max))

    @property
    def clock(self) -> list[float] | None:
        """Seconds of search at the end of each trial; None unless every trial recorded its own."""
        spent = [j.trial.search_seconds for j in self.judged]
        return None if None in spent else list(accumulate(s for s in spent if s is not None))

    @property
    def confirmed(self) -> RacedRecipe | None:
        """The winner on hold-out prompts; None before the search came that far."""
        return next((r for r in reversed(self.raced) if r.split == "holdout"), None)

    def promised(self, contender: RacedRecipe) -> float | None:
        """What the search had predicted of a contender: its own word, else that of the same recipe in the race."""
        same = (r.predicted for r in self.raced if r.predicted and r.drafts == contender.drafts)
        return contender.predicted or next(same, None)

    def mask_of(self, contender: RacedRecipe) -> SkipMask | None:
        """None if no drafter of its recipe has one."""
        if contender.recipe is not None:
            return contender.recipe.mask(self.n_layers)
        return SkipMask(self.n_layers, contender.attn, contender.mlp)


def read_study(where: str | Path, label: str | None = None) -> Study:
    """The study in a journal file or behind a storage URL.

    label: what figures call it; the file's or the data base's name if not given, without any password.
    Raises: SearchError if there is none, it is not one of ours, or no mask in it was judged.
    """
    name = shown(str(where))
    try:
        study = _load(where)
        attributes, trials = study.user_attrs, [t for t in study.get_trials(deepcopy=False) if t.state is not OptunaState.PRUNED]
    except SearchError:
        raise
    except KeyError:
        raise SearchError(f"{name} holds no search of this program: name the study that `skipsearch tune` wrote") from None
    except Exception as error:
        raise SearchError(f"the study {name} cannot be read ({reason(error, str(where))}): name a journal or address that "
                          "`skipsearch tune` wrote") from None
    identity = attributes.get("identity")
    n_layers = identity.get("n_layers") if isinstance(identity, dict) else None
    if not isinstance(n_layers, int) or not 1 <= n_layers <= MAX_LAYERS:
        raise SearchError(f"the study {name} does not say of how many layers its model is: `skipsearch tune` did not write it")
    trials = [t for t in trials if "duplicate_of" not in t.user_attrs]   # of two workers with one mask, who was second
    judged = tuple(j for t in trials if (j := _judged(t, n_layers, name)) is not None)
    if not judged and identity.get("drafters") == "lookup":
        raise SearchError(f"the study {name} was for lookup alone, which has no masks to judge: --profile draws what was measured")
    searches_masks = "skip" in (drafters := str(identity.get("drafters", "skip"))) or drafters == "auto"
    if not judged and (searches_masks or not attributes.get("raced")):
        raise SearchError(f"the study {name} holds no judged mask ({len(trials)} trials, none of them finished with a time): let the "
                          "search go on with `skipsearch tune --resume`")
    raced: tuple[RacedRecipe, ...] = _parsed(tuple[RacedRecipe, ...], attributes.get("raced", []), f"the race in {name}")
    surface: Surface = _parsed(Surface, attributes.get("surface", {}), f"the policy surface in {name}")
    groups: tuple[BroughtGroup, ...] = _parsed(tuple[BroughtGroup, ...], attributes.get("brought", []), f"what drafters brought in {name}")
    masks: MovedMasks | None = _parsed(MovedMasks | None, attributes.get("moved"), f"how masks moved in {name}")
    if masks is not None and len(masks.masks[0][1]) != 2 * n_layers:
        raise SearchError(f"how masks moved in {name} is of another model than its {n_layers} layers: another version may have written it")
    study = Study(label or _label(name), n_layers, identity, judged, len(trials) - len(judged), raced, surface.policies, groups, masks)
    try:
        for contender in raced:
            study.mask_of(contender)
    except MaskError as error:
        raise SearchError(f"the race in {name} cannot be read ({error})") from None
    return study


def study_engine(where: str | Path) -> str | None:
    """The engine that a study was begun with; None where no study can be read, or it does not say."""
    try:
        return str(_load(where).user_attrs["identity"]["engine"])
    except Exception:   # the command that continues it says what is wrong
        return None


def _load(where: str | Path) -> optuna.Study:
    """Raises: SearchError, KeyError where it has no such study, and whatever its storage raises."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    address, called = study_name(str(where)) if is_url(str(where)) else (str(where), STUDY)
    return optuna.load_study(study_name=called, storage=_storage(address, shown(str(where))))


def read_studies(places: Sequence[str | Path]) -> list[Study]:
    """Several studies to show together, called by as much of their names as tells them apart. Raises: SearchError."""
    names = [shown(str(where)) for where in places]
    short = [_label(name) for name in names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SearchError(f"the study {twice} is named twice: give each once")
    return [read_study(where, name if short.count(label) > 1 else label) for where, name, label in zip(places, names, short, strict=True)]


def _url(where: str) -> URL:
    try:
        return make_url(where)
    except ArgumentError:
        raise SearchError(f"--study {where.partition('://')[0]}://… is not a storage address: write postgresql://user@host/name, or a "
                          "journal's file") from None


def _label(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].removesuffix(".journal") or name


def _storage(where: str, name: str) -> BaseStorage:
    """Storage that reading writes nothing to: no file, no table is made."""
    if is_url(where):
        url = _url(where)
        file = url.database if url.get_backend_name() == "sqlite" else None
        if file and not file.startswith(("file:", ":memory:")) and not Path(file).is_file():
            raise SearchError(f"there is no study at {name}: the file does not exist")
        return RDBStorage(with_driver(where), skip_table_creation=True)
    path = Path(where)
    if not path.is_file():
        raise SearchError(f"there is no study at {name}: {'that is a folder' if path.is_dir() else 'the file does not exist'}")
    with path.open("rb") as journal:
        if journal.read(len(JOURNAL_START)) != JOURNAL_START:
            raise SearchError(f"{name} is not the journal of a search: name one that `skipsearch tune` wrote")
    return JournalStorage(JournalFileBackend(str(path)))


def _judged(frozen: FrozenTrial, n_layers: int, name: str) -> Judged | None:
    """None for a trial that failed, was abandoned, or is no mask of this model."""
    seconds, names = frozen.value if frozen.state is OptunaState.COMPLETE else None, parameter_names(n_layers)
    if seconds is None or not (math.isfinite(seconds) and seconds > 0) or not set(names) <= frozen.params.keys():
        return None
    facts: Facts = _parsed(Facts, {k: v for k, v in frozen.user_attrs.items() if v is not None}, f"trial {frozen.number} of {name}")
    mask = SkipMask.from_bits([frozen.params[p] for p in names])
    trial = Trial(mask, seconds, **{key: getattr(facts, key) for key in Facts.model_fields if key != "policy"})
    return Judged(trial, trial.speedup, in_words(facts.recipe, mask.n_skipped, facts.policy)) if trial.speedup else None


def _parsed(kind: Any, value: Any, what: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise SearchError(f"{what} cannot be read ({'.'.join(map(str, first['loc']))}: {first['msg']}): another version may have "
                          "written it") from None
