"""The ledger: every judged mask of a search, as an Optuna study, so that a killed search loses nothing that was finished.

An append-only journal file by default, or any storage URL that Optuna knows. Its dashboards and plots work on it as they are.

Any number of processes share the study of a URL. A worker claims a mask by a RUNNING trial, which its heartbeat keeps alive, and reads the
study again: of equal masks the lowest trial number is measured, the others are PRUNED with `duplicate_of`. The process that notices a
claim without heartbeat FAILs it, and its mask is handed out again. A judged trial is therefore COMPLETE, or FAIL with `failed` if there
is no time for it; all others are no judgements.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution, distribution_to_json
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from sqlalchemy.exc import SQLAlchemyError

from skipsearch import storage
from skipsearch.errors import SearchError
from skipsearch.mask import SkipMask
from skipsearch.recipe import Recipe
from skipsearch.stats import Trial, TrialState
from skipsearch.workers import Heartbeat, News, worker_name

MOST_LOSSES = 3       # of a mask whose worker died; then it is the mask that is to blame
IDENTITY_SECONDS = 5  # how long a study may lack its identity before its creator counts as dead
BIT = IntDistribution(0, 1)
_FACTS = ("stderr", "fidelity", "alpha", "tau", "beta", "baseline_seconds_per_token", "searcher", "search_seconds")


class Ledger:
    """One search. where: a journal file's path, or a storage URL (`#name` behind it names one of several studies there);
    identity: what must be equal for its trials to mean anything here.

    A journal: resume False: the study must be new. True: it must exist; trials left running by a killed process are marked failed.
    A URL: the study is created or joined; with resume it must exist. Finished trials are in `trials()`.
    torn: the last line of a journal was half written, by a kill or on a full disk, and was cut off.
    Raises: SearchError if it exists and should not, or cannot be read or written, or belongs to another search.
    """

    def __init__(self, where: str | Path, identity: Mapping[str, Any], resume: bool = False):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.where, self.shared, self.torn = str(where), storage.is_url(str(where)), False
        self._shown = storage.shown(self.where)
        self._space: dict[str, BaseDistribution] = dict.fromkeys(parameter_names(int(identity["n_layers"])), BIT)
        self._running: dict[int, tuple[int, Heartbeat | None]] = {}   # our claims, by number, with their id in the storage
        self._watched: set[int] = set()                 # others' claims, by number
        self._told: set[SkipMask] | None = None         # judged masks that were in the news; None before the first
        self._masks: dict[int, SkipMask] = {}           # of each trial ever read, by number
        try:
            self._open(identity, resume)
        except SearchError:
            raise
        except Exception as error:
            way_out = "" if self.shared else ": it must be a journal this program wrote, in a folder it may write to, with room on the disk"
            raise SearchError(f"the study {self._shown} cannot be opened ({storage.reason(error, self.where)}){way_out}") from error

    def _open(self, identity: Mapping[str, Any], resume: bool) -> None:
        name = storage.STUDY
        if self.shared:
            address, name = storage.study_name(self.where)
            self._storage = storage.open_database(address)
            begun = name in optuna.get_all_study_names(self._storage)
        else:
            begun = storage.journal_begun(Path(self.where))
            if begun or not resume:  # the first to say is that another process writes it
                self._storage, self.torn = storage.open_journal(Path(self.where))
            if begun and not resume:
                storage.close_journal(Path(self.where))
                raise SearchError(f"{self.where} already holds a search: go on with --resume, or name another file with --study")
        if resume and not begun:
            raise SearchError(f"--resume was given and {self._shown} holds no search yet: leave --resume out, or name another with --study")
        options = {"storage": self._storage, "study_name": name, "sampler": optuna.samplers.RandomSampler(seed=0)}
        try:
            self.study = optuna.create_study(direction="minimize", **options)
            self.study.set_user_attr("identity", dict(identity))  # one attribute, so that a kill cannot leave half of it
        except DuplicatedStudyError:
            self.study = optuna.load_study(**options)
            self._check(identity)
        self._study_id = self._storage.get_study_id_from_name(name)
        if not self.shared:  # nobody else writes it
            for left in self._frozen(OptunaState.RUNNING):
                self._storage.set_trial_state_values(self._id_of(left.number), OptunaState.FAIL)

    def close(self) -> None:
        """No more is judged here: what is claimed is given back, and another process may go on with a journal."""
        for number in list(self._running):
            self.give_back(number, interrupted=True)
        if not self.shared:
            storage.close_journal(Path(self.where))

    def trials(self) -> list[Trial]:
        """Every finished trial in the order of its number, failed ones included."""
        with self._reaching():
            return [self._read(t) for t in self._frozen(OptunaState.COMPLETE, OptunaState.FAIL)]

    def news(self) -> News:
        """What others have done and are doing. A journal has no others: its news are what it held when it was opened.

        Raises: SearchError if the study cannot be reached any more.
        """
        if self._told is not None and not self.shared:
            return News()
        with self._reaching():
            trials = self._after_burials()
        judged = {self._mask(t): t for t in trials if _is_judged(t)}
        pending = {self._mask(t) for t in trials if t.state is OptunaState.RUNNING and t.number not in self._running}
        losses = Counter[SkipMask]()
        for t in trials:
            if t.state is OptunaState.FAIL and self._mask(t) not in judged.keys() | pending:
                losses[self._mask(t)] += "interrupted" not in t.user_attrs
        deadly = [mask for mask, times in losses.items() if times >= MOST_LOSSES]
        told, self._told = self._told or set(), {*judged, *deadly}
        return News((*(self._read(t) for mask, t in judged.items() if mask not in told),
                     *(Trial(mask, math.inf, state=TrialState.FAILED) for mask in deadly if mask not in told)),
                    frozenset(pending), tuple(mask for mask in losses if mask not in deadly))

    def claim(self, mask: SkipMask, most: int | None = None) -> int | None:
        """Note that `mask` is being measured, before it is: a killed process leaves a trace. Returns the trial's number.

        None, of a shared study: another worker has the mask, or `most` masks are judged or being measured without it.
        Raises: SearchError if the study cannot be written any more.
        """
        noted = {"worker": worker_name(), "mask": "".join(map(str, mask.bits))}
        parameters = {} if self.shared else {"params": _parameters(mask), "distributions": self._space}
        with self._reaching():
            trial_id = self._storage.create_new_trial(self._study_id, optuna.trial.create_trial(
                state=OptunaState.RUNNING, user_attrs=noted, **parameters))
            number = int(self._storage.get_trial(trial_id).number)
            if self.shared and (why := self._why_not(number, mask, most)):
                self._end(trial_id, OptunaState.PRUNED, why)
                return None
            if self.shared:
                storage.insert(self._storage, "trial_params", [
                    {"trial_id": trial_id, "param_name": name, "param_value": bit, "distribution_json": distribution_to_json(BIT)}
                    for name, bit in _parameters(mask).items()])
            self._running[number] = trial_id, Heartbeat(self._storage, trial_id) if self.shared else None
        return number

    def finish(self, number: int, trial: Trial, **notes: Any) -> bool:
        """Record the outcome of a claimed trial. False: this process was taken for dead meanwhile, and its mask is another's.

        Raises: SearchError if the study cannot be written any more.
        """
        trial_id, finite = self._stop_heartbeat(number), trial.timed
        try:
            with self._reaching():
                self._end(trial_id, OptunaState.COMPLETE if finite else OptunaState.FAIL, {**_facts(trial), **notes},
                          trial.seconds_per_token if finite else None)
        except UpdateFinishedTrialError:
            return False
        return True

    def give_back(self, number: int, interrupted: bool) -> None:
        """A claimed trial was broken off: by a person's interruption, or by an error that may be the mask's own."""
        trial_id = self._stop_heartbeat(number)
        with suppress(SearchError, UpdateFinishedTrialError), self._reaching():
            self._end(trial_id, OptunaState.FAIL, {"interrupted": True} if interrupted else {})

    def add(self, trial: Trial, **notes: Any) -> None:
        """Record a finished trial in one step: for cheap evaluations of a search that is not shared, which a kill can only lose whole."""
        finite = trial.timed
        judged = optuna.trial.create_trial(
            state=OptunaState.COMPLETE if finite else OptunaState.FAIL, value=trial.seconds_per_token if finite else None,
            params=_parameters(trial.mask), distributions=self._space, user_attrs={**_facts(trial), **notes})
        with self._reaching():
            self.study.add_trial(judged)

    def note(self, key: str, value: Any) -> None:
        """A fact about the whole search, in the study's user attributes."""
        with self._reaching():
            self.study.set_user_attr(key, value)

    def _after_burials(self) -> list[FrozenTrial]:
        """Every trial, those of dead workers failed.

        A worker that dies between its claim and its first sign of life leaves none that could grow old, so whoever sees a claim first gives
        it one in the owner's name.
        """
        if not self.shared:
            return self._frozen()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        trials = self._frozen()
        for t in trials:
            if t.state is OptunaState.RUNNING and t.number not in self._watched | self._running.keys():
                self._watched.add(t.number)
                self._storage.record_heartbeat(self._id_of(t.number))
        return trials

    def _why_not(self, number: int, mask: SkipMask, most: int | None) -> dict[str, Any]:
        """What forbids a claim that was just made, from the study as it is now: trials are numbered one after the other, so of two claims
        at least one sees the other, and both agree whose number is the lower."""
        before = [t for t in self._frozen() if _is_judged(t) or (t.state is OptunaState.RUNNING and t.number < number)]
        for t in before:
            if self._mask(t) == mask:
                return {"duplicate_of": t.number}
        return {"surplus": True} if most is not None and len(before) >= most else {}

    def _end(self, trial_id: int, state: OptunaState, notes: Mapping[str, Any], value: float | None = None) -> None:
        if self.shared:
            storage.insert(self._storage, "trial_user_attributes", [
                {"trial_id": trial_id, "key": key, "value_json": json.dumps(note)} for key, note in notes.items()])
        else:
            for key, note in notes.items():
                self._storage.set_trial_user_attr(trial_id, key, note)
        self._storage.set_trial_state_values(trial_id, state, None if value is None else [value])

    def _stop_heartbeat(self, number: int) -> int:
        trial_id, heartbeat = self._running.pop(number)
        if heartbeat:
            heartbeat.stop()
        return trial_id

    def _id_of(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _frozen(self, *states: OptunaState) -> list[FrozenTrial]:
        """Trials in the order of their numbers, without what another program may have put there."""
        return [t for t in self.study.get_trials(deepcopy=False, states=states or None) if self._is_ours(t)]

    def _is_ours(self, frozen: FrozenTrial) -> bool:
        if frozen.number not in self._masks:
            noted = frozen.user_attrs.get("mask") or "".join(str(frozen.params.get(name, "")) for name in self._space)
            if len(noted) != len(self._space):
                return False
            self._masks[frozen.number] = SkipMask.from_bits([int(bit) for bit in noted])
        return True

    def _mask(self, frozen: FrozenTrial) -> SkipMask:
        return self._masks[frozen.number]

    def _read(self, frozen: FrozenTrial) -> Trial:
        done = frozen.state is OptunaState.COMPLETE and frozen.value is not None
        facts = {key: frozen.user_attrs[key] for key in _FACTS if key in frozen.user_attrs}
        recipe = Recipe.from_data(frozen.user_attrs["recipe"]) if "recipe" in frozen.user_attrs else None
        return Trial(self._mask(frozen), float(frozen.value) if done else math.inf,
                     state=TrialState.COMPLETE if done else TrialState.FAILED, recipe=recipe, **facts)

    def _check(self, identity: Mapping[str, Any]) -> None:
        waited = monotonic()
        while (stored := self.study.user_attrs.get("identity")) is None:
            if not self.shared or monotonic() - waited > IDENTITY_SECONDS:
                self.study.set_user_attr("identity", dict(identity))
                return
            sleep(0.1)
        differing = [f"{key} = {stored.get(key)} (now {value})" for key, value in identity.items()
                     if stored.get(key) != json.loads(json.dumps(value))]
        if differing:
            another = f", such as {self._shown.partition('#')[0]}#another-name" if self.shared else ""
            raise SearchError(f"the search in {self._shown} was made with {', '.join(differing)}: times of the two cannot be compared; "
                              f"start a new one with another --study{another}")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """A full disk or a lost server ends the search with a sentence; what was finished before stays readable."""
        try:
            yield
        except (OSError, KeyError, SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            with suppress(OSError):   # of a line that found no room for all of it: the next one would be glued to it
                if not self.shared:
                    storage.cut_torn_line(Path(self.where))
            cannot, way_out = (("reached any more", "when the server answers again, the same command goes on") if self.shared else
                               ("written", "make room, then go on with --resume"))
            raise SearchError(f"the study {self._shown} cannot be {cannot} ({storage.reason(error, self.where)}): the trials in it are "
                              f"kept; {way_out}") from error


def parameter_names(n_layers: int) -> list[str]:
    """One a sub-layer, in the flat order of `SkipMask`: 1 means skipped."""
    return [f"{kind}_{i:03d}" for i in range(n_layers) for kind in ("attn", "mlp")]


def _parameters(mask: SkipMask) -> dict[str, int]:
    return dict(zip(parameter_names(mask.n_layers), mask.bits, strict=True))


def _facts(trial: Trial) -> dict[str, Any]:
    facts = {key: getattr(trial, key) for key in _FACTS if getattr(trial, key) is not None}
    if trial.recipe is not None:
        facts["recipe"] = trial.recipe.as_data()
    return facts if trial.timed else {**facts, "failed": True}


def _is_judged(frozen: FrozenTrial) -> bool:
    return frozen.state is OptunaState.COMPLETE or (frozen.state is OptunaState.FAIL and "failed" in frozen.user_attrs)
