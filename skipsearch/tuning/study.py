"""Every judged mask of a search, as an Optuna study: a killed search loses no finished trial.

The study is an append-only journal file by default, or at any storage URL that Optuna knows.
Optuna's dashboards and plots can read it.

Any number of processes share the study of a URL. A worker claims a mask by a RUNNING trial, which
its heartbeat keeps alive, and then reads the study again. Of trials with equal masks, the one with
the lowest number is measured. The others are PRUNED, with the attribute `duplicate_of`. A claim
beyond the limit of trials is PRUNED, too, with the attribute `surplus`. A process that finds a
claim with a stale heartbeat marks it FAIL, and the mask is measured again. A judged trial is
therefore COMPLETE, or FAIL with the attribute `failed` if the mask could not be timed. All other
trials do not count.
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
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from sqlalchemy.exc import SQLAlchemyError

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.errors import SearchError
from skipsearch.tuning import storage
from skipsearch.tuning.trial_records import (
    format_bits,
    is_judged,
    mask_parameters,
    parameter_names,
    read_mask,
    read_trial,
    trial_attrs,
)
from skipsearch.tuning.workers import Heartbeat, StudyUpdate, worker_name

MAX_WORKER_DEATHS = 3  # workers that may die at a mask before it counts as failed
IDENTITY_TIMEOUT_S = 5  # if a study has no identity after this time, its creator died
BIT_DISTRIBUTION = IntDistribution(0, 1)


class StudyStore:
    """A study that stores the trials of one search."""

    def __init__(self, location: str | Path, identity: Mapping[str, Any], resume: bool = False):
        """Open a study.

        location: the path of a journal file, or a storage URL (`#name` at its end names one of
        several studies).
        identity: the facts of `study_fingerprint`; those of an existing study must be equal.
        resume: True: the study must exist. False: a journal must be new, and the study of a URL is
        created or joined. Trials that a killed process left running in a journal are marked failed.

        Raises: SearchError if the study exists and should not, does not exist and should, cannot be
        read or written, or belongs to another search.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.location = str(location)
        self.shared = storage.is_url(self.location)  # whether other processes may write it
        self.truncated = False  # whether a half-written last line of a journal was cut off
        self._redacted_location = storage.redact_url(self.location)
        self._n_layers = int(identity["n_layers"])
        self._distributions: dict[str, BaseDistribution] = dict.fromkeys(
            parameter_names(self._n_layers), BIT_DISTRIBUTION
        )
        # This process's claims by trial number: (id in the storage, heartbeat).
        self._claims: dict[int, tuple[int, Heartbeat | None]] = {}
        self._heartbeats_seen: set[int] = set()  # trial numbers of other workers' claims
        self._reported: set[SkipMask] | None = None  # judged masks that `poll` returned
        self._masks: dict[int, SkipMask] = {}  # of every trial that was read, by number
        try:
            self._open(identity, resume)
        except SearchError:
            raise
        except Exception as error:
            way_out = (
                ""
                if self.shared
                else ": it must be a journal this program wrote, in a folder it may write to, with "
                "room on the disk"
            )
            raise SearchError(
                f"the study {self._redacted_location} cannot be opened "
                f"({storage.root_cause(error, self.location)}){way_out}"
            ) from error

    def _open(self, identity: Mapping[str, Any], resume: bool) -> None:
        name = storage.DEFAULT_STUDY_NAME
        if self.shared:
            address, name = storage.split_study_url(self.location)
            self._storage = storage.open_database(address)
            exists = name in optuna.get_all_study_names(self._storage)
        else:
            exists = storage.is_journal(Path(self.location))
            # Opened before the checks below, so that "in use by another process" is reported first.
            if exists or not resume:
                self._storage, self.truncated = storage.open_journal(Path(self.location))
            if exists and not resume:
                storage.close_journal(Path(self.location))
                raise SearchError(
                    f"{self.location} already holds a search: go on with --resume, or name another "
                    "file with --study"
                )
        if resume and not exists:
            raise SearchError(
                f"--resume was given and {self._redacted_location} holds no search yet: leave "
                "--resume out, or name another with --study"
            )
        options = {
            "storage": self._storage,
            "study_name": name,
            "sampler": optuna.samplers.RandomSampler(seed=0),
        }
        try:
            self.study = optuna.create_study(direction="minimize", **options)
            # One attribute, so that a killed process cannot leave half of it.
            self.study.set_user_attr("identity", dict(identity))
        except DuplicatedStudyError:
            self.study = optuna.load_study(**options)
            self._check_identity(identity)
        self._study_id = self._storage.get_study_id_from_name(name)
        if not self.shared:  # no other process can be running a trial
            for frozen in self._read_frozen(OptunaState.RUNNING):
                self._storage.set_trial_state_values(
                    self._trial_id(frozen.number), OptunaState.FAIL
                )

    def close(self) -> None:
        """Release all claims, and let another process open the journal."""
        for number in list(self._claims):
            self.release(number, interrupted=True)
        if not self.shared:
            storage.close_journal(Path(self.location))

    def trials(self) -> list[Trial]:
        """Return every finished trial in the order of its number, failed ones included."""
        with self._storage_errors():
            return [
                self._read_trial(t)
                for t in self._read_frozen(OptunaState.COMPLETE, OptunaState.FAIL)
            ]

    def poll(self) -> StudyUpdate:
        """Return new finished trials, and the running trials of other workers.

        A journal has no other workers: the first call returns its stored trials, and later calls
        return nothing. Raises: SearchError if the study can no longer be reached.
        """
        if self._reported is not None and not self.shared:
            return StudyUpdate()
        with self._storage_errors():
            trials = self._reap_stale_trials()
        judged = {self._mask_of(t): t for t in trials if is_judged(t)}
        pending = {
            self._mask_of(t)
            for t in trials
            if t.state is OptunaState.RUNNING and t.number not in self._claims
        }
        deaths = Counter[SkipMask]()
        for t in trials:
            if t.state is OptunaState.FAIL and self._mask_of(t) not in judged.keys() | pending:
                deaths[self._mask_of(t)] += "interrupted" not in t.user_attrs
        deadly = [mask for mask, count in deaths.items() if count >= MAX_WORKER_DEATHS]
        reported, self._reported = self._reported or set(), {*judged, *deadly}
        return StudyUpdate(
            (
                *(self._read_trial(t) for mask, t in judged.items() if mask not in reported),
                *(
                    Trial(mask, math.inf, state=TrialState.FAILED)
                    for mask in deadly
                    if mask not in reported
                ),
            ),
            frozenset(pending),
            tuple(mask for mask in deaths if mask not in deadly),
        )

    def claim(self, mask: SkipMask, max_trials: int | None = None) -> int | None:
        """Claim `mask` before it is measured, and return the number of its trial.

        In a shared study, returns None if another worker has claimed or judged the mask, or if
        `max_trials` other masks are judged or being measured. Raises: SearchError if the study
        cannot be written.
        """
        attrs = {"worker": worker_name(), "mask": format_bits(mask)}
        parameters = (
            {}
            if self.shared
            else {"params": mask_parameters(mask), "distributions": self._distributions}
        )
        with self._storage_errors():
            trial_id = self._storage.create_new_trial(
                self._study_id,
                optuna.trial.create_trial(
                    state=OptunaState.RUNNING, user_attrs=attrs, **parameters
                ),
            )
            number = int(self._storage.get_trial(trial_id).number)
            if self.shared and (conflict := self._claim_conflict(number, mask, max_trials)):
                self._end_trial(trial_id, OptunaState.PRUNED, conflict)
                return None
            if self.shared:
                storage.insert_parameters(
                    self._storage, trial_id, mask_parameters(mask), BIT_DISTRIBUTION
                )
            heartbeat = Heartbeat(self._storage, trial_id) if self.shared else None
            self._claims[number] = trial_id, heartbeat
        return number

    def finish(self, number: int, trial: Trial, **attrs: Any) -> bool:
        """Record the outcome of a claimed trial.

        Returns False if the claim is no longer valid, because another worker took this process for
        dead. Raises: SearchError if the study can no longer be written.
        """
        trial_id, has_time = self._stop_heartbeat(number), trial.has_time
        try:
            with self._storage_errors():
                self._end_trial(
                    trial_id,
                    OptunaState.COMPLETE if has_time else OptunaState.FAIL,
                    {**trial_attrs(trial), **attrs},
                    trial.seconds_per_token if has_time else None,
                )
        except UpdateFinishedTrialError:
            return False
        return True

    def release(self, number: int, interrupted: bool) -> None:
        """Give up a claim.

        interrupted: True if the user stopped the search, False if the mask caused an error.
        """
        trial_id = self._stop_heartbeat(number)
        with suppress(SearchError, UpdateFinishedTrialError), self._storage_errors():
            self._end_trial(
                trial_id, OptunaState.FAIL, {"interrupted": True} if interrupted else {}
            )

    def add(self, trial: Trial, **attrs: Any) -> None:
        """Record a finished trial in one step, without a claim.

        This is for cheap trials of a search that is not shared.
        """
        has_time = trial.has_time
        frozen = optuna.trial.create_trial(
            state=OptunaState.COMPLETE if has_time else OptunaState.FAIL,
            value=trial.seconds_per_token if has_time else None,
            params=mask_parameters(trial.mask),
            distributions=self._distributions,
            user_attrs={**trial_attrs(trial), **attrs},
        )
        with self._storage_errors():
            self.study.add_trial(frozen)

    def set_attr(self, key: str, value: Any) -> None:
        """Store a fact about the search as an attribute of the study."""
        with self._storage_errors():
            self.study.set_user_attr(key, value)

    def get_attr(self, key: str) -> Any:
        """Return an attribute of the study; None if it is not set."""
        with self._storage_errors():
            return self.study.user_attrs.get(key)

    def _reap_stale_trials(self) -> list[FrozenTrial]:
        """Mark the trials of dead workers as failed, and return all trials.

        A worker that dies between its claim and its first heartbeat leaves no heartbeat that could
        expire. The first process that sees a new claim therefore records a heartbeat for it.
        """
        if not self.shared:
            return self._read_frozen()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        trials = self._read_frozen()
        for t in trials:
            is_new = t.number not in self._heartbeats_seen | self._claims.keys()
            if t.state is OptunaState.RUNNING and is_new:
                self._heartbeats_seen.add(t.number)
                self._storage.record_heartbeat(self._trial_id(t.number))
        return trials

    def _claim_conflict(
        self, number: int, mask: SkipMask, max_trials: int | None
    ) -> dict[str, Any]:
        """Return why a claim must be given up, as attributes for its trial; {} if it is valid.

        `duplicate_of` is the number of another trial of this mask: a judged one, or an earlier
        claim. `surplus` says that `max_trials` masks are judged or claimed earlier. Numbers are
        given out in order, so of two claims, the process with the higher number sees the other
        claim, and gives up.
        """
        earlier = [
            t
            for t in self._read_frozen()
            if is_judged(t) or (t.state is OptunaState.RUNNING and t.number < number)
        ]
        for t in earlier:
            if self._mask_of(t) == mask:
                return {"duplicate_of": t.number}
        return {"surplus": True} if max_trials is not None and len(earlier) >= max_trials else {}

    def _end_trial(
        self,
        trial_id: int,
        state: OptunaState,
        attrs: Mapping[str, Any],
        value: float | None = None,
    ) -> None:
        if self.shared:
            storage.insert_attributes(self._storage, trial_id, attrs)
        else:
            for key, attr in attrs.items():
                self._storage.set_trial_user_attr(trial_id, key, attr)
        self._storage.set_trial_state_values(trial_id, state, None if value is None else [value])

    def _stop_heartbeat(self, number: int) -> int:
        trial_id, heartbeat = self._claims.pop(number)
        if heartbeat:
            heartbeat.stop()
        return trial_id

    def _trial_id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _read_frozen(self, *states: OptunaState) -> list[FrozenTrial]:
        """Return trials in the order of their numbers, without those that other programs wrote."""
        trials = self.study.get_trials(deepcopy=False, states=states or None)
        for t in trials:
            if t.number not in self._masks and (mask := read_mask(t, self._n_layers)) is not None:
                self._masks[t.number] = mask
        return [t for t in trials if t.number in self._masks]

    def _mask_of(self, frozen: FrozenTrial) -> SkipMask:
        return self._masks[frozen.number]

    def _read_trial(self, frozen: FrozenTrial) -> Trial:
        return read_trial(frozen, self._mask_of(frozen))

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise SearchError if the study has another identity; set it if there is none."""
        started = monotonic()
        while (stored := self.study.user_attrs.get("identity")) is None:
            if not self.shared or monotonic() - started > IDENTITY_TIMEOUT_S:
                self.study.set_user_attr("identity", dict(identity))
                return
            sleep(0.1)
        differences = [
            f"{key} = {stored.get(key)} (now {value})"
            for key, value in identity.items()
            if stored.get(key) != json.loads(json.dumps(value))
        ]
        if differences:
            example = (
                f", such as {self._redacted_location.partition('#')[0]}#another-name"
                if self.shared
                else ""
            )
            raise SearchError(
                f"the search in {self._redacted_location} was made with {', '.join(differences)}: "
                "times of the two cannot be compared; "
                f"start a new one with another --study{example}"
            )

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Turn errors of the storage (full disk, lost server) into SearchError."""
        try:
            yield
        except (
            OSError,
            KeyError,
            SQLAlchemyError,
            optuna.exceptions.StorageInternalError,
        ) as error:
            # The next line would be appended to a partial one.
            with suppress(OSError):
                if not self.shared:
                    storage.truncate_partial_line(Path(self.location))
            cannot, way_out = (
                ("reached any more", "when the server answers again, the same command goes on")
                if self.shared
                else ("written", "make room, then go on with --resume")
            )
            raise SearchError(
                f"the study {self._redacted_location} cannot be {cannot} "
                f"({storage.root_cause(error, self.location)}): the trials in it are "
                f"kept; {way_out}"
            ) from error
