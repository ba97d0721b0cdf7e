"""Read a study for a report, without writing to it.

`tuning.study` cannot do so: it opens a study to continue it, creates missing tables, and marks the
trials of killed processes as failed. A search that still runs lacks what `tune`
stores at its end; a figure that needs it says so.
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

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.errors import MaskError, SearchError
from skipsearch.report.recorded import (
    MAX_LAYERS,
    RaceRecord,
    StoredReading,
    StoredReliabilityBin,
    StoredSample,
    StoredTrialAttrs,
)
from skipsearch.tuning.storage import (
    DEFAULT_STUDY_NAME,
    JOURNAL_START,
    is_url,
    redact_url,
    root_cause,
    split_study_url,
    with_psycopg,
)
from skipsearch.tuning.trial_records import parameter_names


@dataclass(frozen=True)
class JudgedTrial:
    """A completed trial with its speedup over plain decoding."""

    trial: Trial
    speedup: float  # predicted or, if the objective is `wall`, measured

    @property
    def recipe(self) -> str:
        """The recipe with which the mask was judged, in words."""
        return str(self.trial.recipe)

    @property
    def searcher(self) -> str:
        return self.trial.searcher

    @property
    def half_width(self) -> float:
        """Half the width of the speedup's 95 % interval, from the standard error of the time."""
        return 1.96 * self.speedup * self.trial.stderr / self.trial.seconds_per_token


@dataclass(frozen=True)
class StudyRecord:
    """A study as a report reads it."""

    label: str  # its name in figures
    n_layers: int
    identity: Mapping[str, Any]  # conditions of the search: model, task, device, …
    judged: tuple[JudgedTrial, ...]  # finished trials in their order
    n_left_out: int = 0  # trials without a time or a baseline (failed, abandoned)
    race: tuple[RaceRecord, ...] = ()
    reliability: tuple[StoredReliabilityBin, ...] = ()
    readings: tuple[StoredReading, ...] = ()
    sample: StoredSample | None = None  # an answer of the winner

    @property
    def best(self) -> JudgedTrial | None:
        """The judged trial with the highest speedup; None if no mask was judged."""
        return max(self.judged, key=lambda j: j.speedup, default=None)

    @property
    def searchers(self) -> tuple[str, ...]:
        """Names of the searchers, in order of appearance."""
        return tuple(dict.fromkeys(j.searcher for j in self.judged))

    @property
    def best_so_far(self) -> list[float]:
        return list(accumulate((j.speedup for j in self.judged), max))

    @property
    def elapsed_s(self) -> list[float]:
        """Seconds of search at the end of each trial."""
        return list(accumulate(j.trial.search_seconds or 0.0 for j in self.judged))

    @property
    def confirmed(self) -> RaceRecord | None:
        """The winner on hold-out prompts; None if the search ended before this measurement."""
        return next((r for r in reversed(self.race) if r.split == "holdout"), None)

    def predicted_speedup(self, record: RaceRecord) -> float | None:
        """Return the predicted speedup of a record, or of the same recipe in the race."""
        same = (r.predicted for r in self.race if r.predicted and r.recipe == record.recipe)
        return record.predicted or next(same, None)

    def mask_of(self, record: RaceRecord) -> SkipMask | None:
        """Return a record's mask; None if no drafter of its recipe has one."""
        return record.recipe.mask(self.n_layers)


def read_study(location: str | Path, label: str | None = None) -> StudyRecord:
    """Read the study in a journal file or at a storage URL.

    label: its name in figures; by default the file's or database's name, without any password.
    Raises: SearchError if the study does not exist, was not written by `skipsearch tune`, or has no
    judged mask.
    """
    name = redact_url(str(location))
    try:
        study = _load_study(location)
        attributes = study.user_attrs
        trials = study.get_trials(deepcopy=False)
    except SearchError:
        raise
    except KeyError:
        raise SearchError(
            f"{name} holds no search of this program: name the study that `skipsearch tune` wrote"
        ) from None
    except Exception as error:
        raise SearchError(
            f"the study {name} cannot be read ({root_cause(error, str(location))}): name a journal "
            "or address that "
            "`skipsearch tune` wrote"
        ) from None
    identity = attributes.get("identity")
    n_layers = identity.get("n_layers") if isinstance(identity, dict) else None
    if not isinstance(n_layers, int) or not 1 <= n_layers <= MAX_LAYERS:
        raise SearchError(
            f"the study {name} does not say how many layers its model has: `skipsearch tune` did "
            "not write it"
        )
    # A duplicate: two workers judged the same mask.
    trials = [
        trial
        for trial in trials
        if trial.state is not OptunaState.PRUNED and "duplicate_of" not in trial.user_attrs
    ]
    judged = tuple(j for t in trials if (j := _read_judged(t, n_layers, name)) is not None)
    if not judged and identity.get("drafters") == "lookup":
        raise SearchError(
            f"the study {name} was for lookup alone, which has no masks to judge: --profile draws "
            "what was measured"
        )
    drafters = str(identity.get("drafters", "skip"))
    searches_masks = drafters == "auto" or "skip" in drafters
    if not judged and (searches_masks or not attributes.get("raced")):
        raise SearchError(
            f"the study {name} holds no judged mask ({len(trials)} trials, none of them finished "
            "with a time): let the "
            "search go on with `skipsearch tune --resume`"
        )
    race: tuple[RaceRecord, ...] = _parse_attr(
        tuple[RaceRecord, ...], attributes.get("raced", []), f"the race in {name}"
    )
    bins: tuple[StoredReliabilityBin, ...] = _parse_attr(
        tuple[StoredReliabilityBin, ...],
        attributes.get("brought", []),
        f"the reliability of drafters in {name}",
    )
    readings: tuple[StoredReading, ...] = _parse_attr(
        tuple[StoredReading, ...], attributes.get("readings", []), f"the number formats in {name}"
    )
    sample: StoredSample | None = _parse_attr(
        StoredSample | None, attributes.get("sample"), f"the sample answer in {name}"
    )
    study = StudyRecord(
        label or _short_name(name),
        n_layers,
        identity,
        judged,
        len(trials) - len(judged),
        race,
        bins,
        readings,
        sample,
    )
    try:
        for record in race:
            study.mask_of(record)
    except MaskError as error:
        raise SearchError(f"the race in {name} cannot be read ({error})") from None
    return study


def read_study_engine(location: str | Path) -> str | None:
    """Return the engine that a study began with; None if the study cannot be read or has none."""
    try:
        return str(_load_study(location).user_attrs["identity"]["engine"])
    except Exception:  # the command that continues the study reports the error
        return None


def _load_study(location: str | Path) -> optuna.Study:
    """Load a study. Raises: SearchError; KeyError if it does not exist; errors of its storage."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    address, study_name = (
        split_study_url(str(location))
        if is_url(str(location))
        else (str(location), DEFAULT_STUDY_NAME)
    )
    return optuna.load_study(
        study_name=study_name, storage=_open_read_only(address, redact_url(str(location)))
    )


def read_studies(locations: Sequence[str | Path]) -> list[StudyRecord]:
    """Read several studies, with short labels that differ. Raises: SearchError."""
    names = [redact_url(str(location)) for location in locations]
    short = [_short_name(name) for name in names]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise SearchError(f"the study {duplicate} is named twice: give each once")
    return [
        read_study(location, name if short.count(label) > 1 else label)
        for location, name, label in zip(locations, names, short, strict=True)
    ]


def _parse_url(location: str) -> URL:
    try:
        return make_url(location)
    except ArgumentError:
        raise SearchError(
            f"--study {location.partition('://')[0]}://… is not a storage address: write "
            "postgresql://user@host/name, or a "
            "journal's file"
        ) from None


def _short_name(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].removesuffix(".journal") or name


def _open_read_only(location: str, name: str) -> BaseStorage:
    """Open a storage without creating a file or a table."""
    if is_url(location):
        url = _parse_url(location)
        file = url.database if url.get_backend_name() == "sqlite" else None
        if file and not file.startswith(("file:", ":memory:")) and not Path(file).is_file():
            raise SearchError(f"there is no study at {name}: the file does not exist")
        return RDBStorage(with_psycopg(location), skip_table_creation=True)
    path = Path(location)
    if not path.is_file():
        raise SearchError(
            f"there is no study at {name}: "
            f"{'that is a folder' if path.is_dir() else 'the file does not exist'}"
        )
    with path.open("rb") as journal:
        if journal.read(len(JOURNAL_START)) != JOURNAL_START:
            raise SearchError(
                f"{name} is not the journal of a search: name one that `skipsearch tune` wrote"
            )
    return JournalStorage(JournalFileBackend(str(path)))


def _read_judged(frozen: FrozenTrial, n_layers: int, name: str) -> JudgedTrial | None:
    """Return a judged trial; None if it failed, was abandoned, or has no mask of this model."""
    seconds = frozen.value if frozen.state is OptunaState.COMPLETE else None
    if seconds is None or not (math.isfinite(seconds) and seconds > 0):
        return None
    names = parameter_names(n_layers)
    if not set(names) <= frozen.params.keys():
        return None
    facts: StoredTrialAttrs = _parse_attr(
        StoredTrialAttrs,
        {k: v for k, v in frozen.user_attrs.items() if v is not None},
        f"trial {frozen.number} of {name}",
    )
    mask = SkipMask.from_bits([frozen.params[p] for p in names])
    trial = Trial(mask, seconds, **{key: getattr(facts, key) for key in type(facts).model_fields})
    return JudgedTrial(trial, trial.speedup) if trial.speedup else None


def _parse_attr(kind: Any, value: Any, attr_name: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise SearchError(
            f"{attr_name} cannot be read ({'.'.join(map(str, first['loc']))}: {first['msg']}): "
            "another version may have "
            "written it"
        ) from None
