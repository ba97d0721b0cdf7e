"""The ledger: every judged mask of a search, as an Optuna study, so that a killed search loses nothing that was finished.

An append-only journal file by default, or any storage URL that Optuna knows. Its dashboards and plots work on it as they are.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as OptunaState

from skipsearch.errors import SearchError
from skipsearch.mask import SkipMask
from skipsearch.stats import Trial, TrialState

STUDY = "skipsearch"
JOURNAL_START = b'{"op_code":'   # what Optuna begins every journal with
_FACTS = ("stderr", "fidelity", "alpha", "tau", "beta", "baseline_seconds_per_token", "policy", "searcher", "search_seconds")


class Ledger:
    """One search. where: a journal file's path, or a storage URL; identity: what must be equal for its trials to mean anything here.

    resume False: the study must be new. True: it must exist and have the same identity; trials left running by a killed process are
    marked failed, finished ones are in `trials()`.
    Raises: SearchError if it exists and should not, or cannot be read or written, or belongs to another search.
    """

    def __init__(self, where: str | Path, identity: Mapping[str, Any], resume: bool = False):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.where = str(where)
        n_layers = int(identity["n_layers"])
        self._space: dict[str, BaseDistribution] = {name: IntDistribution(0, 1) for name in parameter_names(n_layers)}
        self._running: dict[int, optuna.trial.Trial] = {}
        exists = self._exists()
        if exists and not resume:
            raise SearchError(f"{self.where} already holds a search: go on with --resume, or name another file with --study")
        if resume and not exists:
            raise SearchError(f"--resume was given and {self.where} holds no search yet: leave --resume out, or name its file with --study")
        try:
            storage = self._storage()
            self.study = optuna.create_study(storage=storage, study_name=STUDY, direction="minimize", load_if_exists=True,
                                             sampler=optuna.samplers.RandomSampler(seed=0))
            if "identity" in self.study.user_attrs:
                self._check(identity)
                self._fail_orphans()
            else:  # one attribute, so that a kill cannot leave half of it
                self.study.set_user_attr("identity", dict(identity))
        except SearchError:
            raise
        except Exception as error:
            raise SearchError(f"the study {self.where} cannot be opened ({_reason(error)}): it must be a journal this program wrote, "
                              "in a folder it may write to") from error

    def trials(self) -> list[Trial]:
        """Every finished trial in the order of its number, failed ones included."""
        return [self._read(t) for t in self.study.get_trials(deepcopy=False) if t.state.is_finished() and len(t.params) == len(self._space)]

    def claim(self, mask: SkipMask) -> int:
        """Note that `mask` is being measured, before it is: a killed process leaves a trace. Returns the trial's number."""
        with self._writing():
            self.study.enqueue_trial(_parameters(mask))
            running = self.study.ask(self._space)
        self._running[running.number] = running
        return running.number

    def finish(self, number: int, trial: Trial, **notes: Any) -> None:
        """Record the outcome of a claimed trial."""
        running = self._running.pop(number)
        finite = trial.state is TrialState.COMPLETE and math.isfinite(trial.seconds_per_token)
        with self._writing():
            for key, value in {**_facts(trial), **notes}.items():
                running.set_user_attr(key, value)
            self.study.tell(number, trial.seconds_per_token if finite else None, state=OptunaState.COMPLETE if finite else OptunaState.FAIL)

    def add(self, trial: Trial, **notes: Any) -> None:
        """Record a finished trial in one step: for cheap evaluations, which a kill can only lose whole."""
        finite = trial.state is TrialState.COMPLETE and math.isfinite(trial.seconds_per_token)
        judged = optuna.trial.create_trial(
            state=OptunaState.COMPLETE if finite else OptunaState.FAIL, value=trial.seconds_per_token if finite else None,
            params=_parameters(trial.mask), distributions=self._space, user_attrs={**_facts(trial), **notes})
        with self._writing():
            self.study.add_trial(judged)

    def note(self, key: str, value: Any) -> None:
        """A fact about the whole search, in the study's user attributes."""
        with self._writing():
            self.study.set_user_attr(key, value)

    def _read(self, frozen: optuna.trial.FrozenTrial) -> Trial:
        mask = SkipMask.from_bits([frozen.params[name] for name in self._space])
        done = frozen.state is OptunaState.COMPLETE and frozen.value is not None
        facts = {key: frozen.user_attrs[key] for key in _FACTS if key in frozen.user_attrs}
        return Trial(mask, float(frozen.value) if done and frozen.value is not None else math.inf,
                     state=TrialState.COMPLETE if done else TrialState.FAILED, **facts)

    def _check(self, identity: Mapping[str, Any]) -> None:
        stored = self.study.user_attrs["identity"]
        differing = [f"{key} = {stored.get(key)} (now {value})" for key, value in identity.items()
                     if stored.get(key) != json.loads(json.dumps(value))]
        if differing:
            raise SearchError(f"the search in {self.where} was made with {', '.join(differing)}: times of the two cannot be compared; "
                              "start a new one with another --study")

    def _fail_orphans(self) -> None:
        for trial in self.study.get_trials(deepcopy=False, states=(OptunaState.RUNNING, OptunaState.WAITING)):
            if trial.state is OptunaState.RUNNING:
                self.study.tell(trial.number, state=OptunaState.FAIL)
            else:
                self.study.ask(self._space)  # takes the waiting one off the queue
                self.study.tell(trial.number, state=OptunaState.FAIL)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or a lost server ends the search with a sentence; what was finished before stays readable."""
        try:
            yield
        except (OSError, optuna.exceptions.StorageInternalError) as error:
            raise SearchError(f"the study {self.where} cannot be written ({_reason(error)}): the trials in it are kept; make room or "
                              "reach the server again, then go on with --resume") from error

    @property
    def _is_url(self) -> bool:
        return "://" in self.where

    def _exists(self) -> bool:
        if not self._is_url:
            start = _start(Path(self.where))
            if start != JOURNAL_START[:len(start)]:  # Optuna would write its lines behind those of any file
                raise SearchError(f"{self.where} is not the journal of a search: name another file with --study")
            return bool(start)
        try:
            return STUDY in optuna.get_all_study_names(self.where)
        except Exception as error:
            raise SearchError(f"the study {self.where} cannot be reached ({_reason(error)}): check the address and that the server "
                              "runs") from error

    def _storage(self) -> str | BaseStorage:
        if self._is_url:
            return self.where
        path = Path(self.where)
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return JournalStorage(JournalFileBackend(str(path)))


def parameter_names(n_layers: int) -> list[str]:
    """One a sub-layer, in the flat order of `SkipMask`: 1 means skipped."""
    return [f"{kind}_{i:03d}" for i in range(n_layers) for kind in ("attn", "mlp")]


def _parameters(mask: SkipMask) -> dict[str, int]:
    return dict(zip(parameter_names(mask.n_layers), mask.bits, strict=True))


def _facts(trial: Trial) -> dict[str, Any]:
    return {key: getattr(trial, key) for key in _FACTS if getattr(trial, key) is not None}


def _cut_torn_line(path: Path) -> None:
    """A process killed while it wrote leaves half a line, to which the next one would be glued: cut it off."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _start(path: Path) -> bytes:
    """As much of a file as tells a journal; nothing if there is no such file."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(len(JOURNAL_START))
    except OSError as error:
        raise SearchError(f"the study {path} cannot be read ({error.strerror}): name another file with --study") from error


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
