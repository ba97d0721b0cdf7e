"""One search, many workers: no mask is measured twice, none is lost, and nobody joins whose times
could not be compared.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import optuna
import pytest
from helpers import four_workers
from helpers.four_workers import TOY
from helpers.marks import thorough
from helpers.postgresql import execute, postgresql
from helpers.sqlite import unsynced_sqlite
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from sqlalchemy import make_url

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.errors import SearchError
from skipsearch.tuning.events import Notice, StageProgress, TuneEvent, TuneListener
from skipsearch.tuning.search_loop import INITIAL_DESIGN, Search
from skipsearch.tuning.storage import open_database
from skipsearch.tuning.study import MAX_WORKER_DEATHS, StudyStore
from skipsearch.tuning.workers import StudyUpdate
from tuning.test_study import BARE, FAILED, FULL, IDENTITY, LAYERS, claimed

__all__ = ["postgresql", "unsynced_sqlite"]


@pytest.fixture(params=["sqlite", *thorough("postgresql")])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"sqlite:///{tmp_path / 'search.db'}"
        if request.param == "sqlite"
        else request.getfixturevalue("postgresql")
    )


@pytest.fixture
def together(tmp_path: Path) -> str:
    """Where searches that differ in nothing but the server are tried: the claims are tested on
    both.
    """
    return f"sqlite:///{tmp_path / 'search.db'}"


def states(ledger: StudyStore) -> list[tuple[str, dict[str, Any]]]:
    """What dashboards see of each trial: its state, and what we say of it beside facts and
    worker.
    """
    said = ("duplicate_of", "surplus", "failed", "interrupted")
    return [
        (t.state.name, {key: t.user_attrs[key] for key in said if key in t.user_attrs})
        for t in ledger.study.get_trials()
    ]


@pytest.fixture
def pair(url: str) -> tuple[StudyStore, StudyStore]:
    """Two workers of one study."""
    return StudyStore(url, IDENTITY), StudyStore(url, IDENTITY)


# --- joining


def test_a_shared_study_is_joined_by_naming_it(url: str) -> None:
    StudyStore(url, IDENTITY).add(FULL)
    assert (
        StudyStore(url, IDENTITY).trials()
        == StudyStore(url, IDENTITY, resume=True).trials()
        == [FULL]
    )


def test_other_hardware_or_versions_cannot_join_a_shared_search_and_are_told_how_to_have_their_own(
    url: str,
) -> None:
    StudyStore(url, IDENTITY).add(FULL)
    for change in (
        {"device": "2 × another GPU"},
        {"software": {"torch": "3", "cuda": None}},
        {"dtype": "bfloat16"},
    ):
        for resume in (True, False):
            with pytest.raises(
                SearchError,
                match=rf"{next(iter(change))} = .*now .*--study, such as .*#another-name",
            ) as caught:
                StudyStore(url, {**IDENTITY, **change}, resume)
            assert (make_url(url).password or "no password") not in str(caught.value)
    other = StudyStore(f"{url}#another-name", {**IDENTITY, "dtype": "bfloat16"})
    assert other.trials() == []
    assert StudyStore(url, IDENTITY).trials() == [FULL], "one server holds many searches"


# --- claims


def test_a_mask_that_another_worker_measures_is_pending_and_then_news(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    number = claimed(one, FULL.mask)
    assert two.poll() == StudyUpdate(pending=frozenset({FULL.mask}))
    assert one.poll() == StudyUpdate(), "one's own is not pending"
    assert one.finish(number, FULL)
    assert two.poll() == StudyUpdate(judged=(FULL,))
    assert two.poll() == StudyUpdate(), "told once"


def test_each_claim_says_who_measures(pair: tuple[StudyStore, StudyStore]) -> None:
    claimed(pair[0], FULL.mask)
    assert pair[1].study.get_trials()[0].user_attrs["worker"].endswith(f":{os.getpid()}")


def test_of_equal_masks_the_lowest_trial_is_measured_and_the_others_are_marked(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    number = claimed(one, FULL.mask)
    assert two.claim(FULL.mask) is None, "while it is measured"
    one.finish(number, FULL)
    assert two.claim(FULL.mask) is None, "and after"
    assert states(two) == [
        ("COMPLETE", {}),
        ("PRUNED", {"duplicate_of": 0}),
        ("PRUNED", {"duplicate_of": 0}),
    ]
    assert two.trials() == [FULL], "a duplicate is no trial of ours"


def test_of_equal_claims_made_at_the_same_moment_exactly_the_lower_one_goes_on(
    pair: tuple[StudyStore, StudyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    look = one._claim_conflict

    def late(*claim: Any) -> Any:
        assert two.claim(FULL.mask) is None, (
            "the second sees the first one's claim, which has not looked yet"
        )
        return look(*claim)

    monkeypatch.setattr(one, "_claim_conflict", late)
    assert one.claim(FULL.mask) == 0


def test_no_more_masks_are_begun_than_the_study_is_to_have(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    one.add(FULL)
    assert one.claim(BARE.mask, max_trials=2) == 1
    assert two.claim(FAILED.mask, max_trials=2) is None
    assert states(two)[-1] == ("PRUNED", {"surplus": True})
    one.release(1, interrupted=False)
    assert two.claim(FAILED.mask, max_trials=2) == 3, "there is room again"


def test_a_judged_failure_is_known_to_all_and_not_handed_out_again(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    one.finish(claimed(one, FAILED.mask), FAILED)
    assert two.poll() == StudyUpdate(judged=(FAILED,))
    assert two.claim(FAILED.mask) is None


def test_a_mask_that_was_given_back_is_handed_out_again_until_it_is_judged(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    one.release(claimed(one, FULL.mask), interrupted=True)
    assert one.poll().orphaned == two.poll().orphaned == (FULL.mask,)
    number = claimed(two, FULL.mask)
    assert one.poll() == StudyUpdate(pending=frozenset({FULL.mask}))
    two.finish(number, FULL)
    assert one.poll() == StudyUpdate(judged=(FULL,))


def test_a_mask_over_which_one_worker_after_the_other_died_is_taken_to_have_failed(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    for _ in range(MAX_WORKER_DEATHS):
        one.release(claimed(one, BARE.mask), interrupted=False)
        one.release(claimed(one, FULL.mask), interrupted=True)  # people interrupt any mask
    assert two.poll() == StudyUpdate(
        judged=(Trial(BARE.mask, math.inf, state=TrialState.FAILED),), orphaned=(FULL.mask,)
    )


def test_what_comes_of_a_worker_that_was_taken_for_dead_is_not_counted_twice(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    one, two = pair
    number = claimed(one, FULL.mask)
    two._storage.set_trial_state_values(two._trial_id(number), OptunaState.FAIL)
    again = claimed(two, FULL.mask)
    assert not one.finish(number, FULL)
    assert one.poll().pending == {FULL.mask}
    assert two.finish(again, FULL)
    assert [t.state for t in two.trials()] == [TrialState.FAILED, TrialState.COMPLETE]


def test_a_claim_without_a_sign_of_life_grows_old_from_the_moment_somebody_sees_it(
    pair: tuple[StudyStore, StudyStore],
) -> None:
    """A worker may die between its claim and its first heartbeat."""
    one, two = pair
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("skipsearch.tuning.study.Heartbeat", lambda *_: None)
        claimed(one, FULL.mask)
    two._storage.grace_period = 1
    for _ in waiting():
        if two.poll().orphaned == (FULL.mask,):
            break


def test_of_workers_that_begin_a_study_at_once_one_creates_it_and_other_kinds_are_refused(
    url: str,
) -> None:
    other = {**IDENTITY, "dtype": "bfloat16"}
    with ThreadPoolExecutor(6) as pool:
        opened = [pool.submit(StudyStore, url, identity) for identity in [IDENTITY, other] * 3]
    errors = [future.exception() for future in opened]
    mine, others = errors[::2], errors[1::2]
    assert {mine == [None] * 3, others == [None] * 3} == {True, False}
    assert all("dtype" in str(error) for error in errors if error)


def test_a_study_whose_creator_died_before_it_said_of_what_is_taken_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipsearch.tuning.study.IDENTITY_TIMEOUT_S", 0)
    optuna.create_study(storage=open_database(url), study_name="skipsearch")
    StudyStore(url, IDENTITY).add(FULL)
    with pytest.raises(SearchError, match="dtype"):
        StudyStore(url, {**IDENTITY, "dtype": "bfloat16"})


@pytest.mark.thorough
def test_a_lost_server_ends_the_search_with_a_message_and_the_search_continues_when_it_is_back(
    postgresql: str,
) -> None:
    address, _, name = postgresql.rpartition("/")
    ledger = StudyStore(postgresql, IDENTITY)
    ledger.add(FULL)
    number, other = claimed(ledger, BARE.mask), claimed(ledger, FAILED.mask)
    server = f"{address}/postgres"
    execute(
        server,
        f"ALTER DATABASE {name} ALLOW_CONNECTIONS false",
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
    )
    for use in (
        ledger.poll,
        ledger.trials,
        lambda: ledger.add(BARE),
        lambda: ledger.finish(number, BARE),
    ):
        with pytest.raises(
            SearchError,
            match=r"cannot be reached any more \(.*accepting connections.*trials in it are kept",
        ) as caught:
            use()
        assert "\n" not in str(caught.value)
        assert str(make_url(postgresql).password) not in str(caught.value)
    ledger.release(other, interrupted=True)  # says nothing: there is an error on its way already
    execute(server, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    assert ledger.trials() == [FULL], "the same process goes on"
    assert StudyStore(postgresql, IDENTITY).poll() == StudyUpdate(
        judged=(FULL,), pending=frozenset({BARE.mask, FAILED.mask})
    )


def waiting(seconds: float = 300) -> Iterator[None]:
    """Rounds of a loop that waits for something; it fails if that does not come."""
    began = monotonic()
    while monotonic() - began < seconds:
        yield
        sleep(0.1)
    pytest.fail(f"waited for {seconds} seconds")


# --- searching


def test_two_workers_judge_by_replay_what_one_would_without_doing_anything_twice(
    together: str,
) -> None:
    """Cheap judgements are claimed too, where there is somebody who might make the same one."""
    judged: list[SkipMask] = []
    searches = [two_at_work(together, judged, "replay") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(search.run, "random") for search in searches]:
            done.result()
    assert len(judged) == len(set(judged)) == 8
    for search in searches:
        assert set(search.judged_trials) == set(judged), "each knows what the other one judged"
    assert searches[0].best_trials(3) == searches[1].best_trials(3)
    assert {t.searcher for t in searches[0].judged_trials.values()} == INITIAL_DESIGN.keys(), (
        "whoever proposed it, not who measured it"
    )


def test_a_worker_that_joins_late_learns_what_was_judged_and_says_so(together: str) -> None:
    two_at_work(together, [], "wall").run("random")
    judged, events = list[SkipMask](), list[TuneEvent]()
    late = two_at_work(together, judged, "wall", trials=11, listen=events.append)
    late.run("random")
    assert len(late.judged_trials) == 11
    assert len(judged) == 3
    assert events[0] == Notice(
        "searching together: 8 masks judged so far, 0 being judged elsewhere"
    )
    assert [e.done for e in events[1:] if isinstance(e, StageProgress)] == [9, 10, 11], (
        "progress is the study's"
    )


def test_what_others_judged_and_are_judging_is_known_before_a_mask_is_proposed(
    together: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (SkipMask(LAYERS, (layer,)) for layer in range(3))
    heard: list[Any] = []

    class Learner:
        def ask(self, pending: Collection[SkipMask]) -> SkipMask | None:
            heard.append(set(pending))
            other.finish(number, TOY.trial(second, "wall")) if number in other._claims else None
            return None if second in heard else third

        def tell(self, trial: Trial) -> None:
            heard.append(trial.mask)

    other = StudyStore(together, IDENTITY)
    other.add(TOY.trial(first, "wall"))
    number = claimed(other, second)
    monkeypatch.setattr("skipsearch.tuning.search_loop.INITIAL_DESIGN", {})
    monkeypatch.setattr("skipsearch.tuning.search_loop.make_searcher", lambda *_: Learner())
    two_at_work(together, [], "wall").run("mine")
    assert heard == [first, {second}, third, second, set()]


def test_an_interrupted_measurement_is_free_for_others_at_once(together: str) -> None:
    search = two_at_work(together, [], "wall")

    def interrupted(mask: SkipMask) -> Any:
        raise KeyboardInterrupt

    search.objective.judge = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        search.run("random")
    assert len(StudyStore(together, IDENTITY).poll().orphaned) == 1


def test_a_worker_waits_for_the_last_masks_of_others_and_takes_them_over_if_they_are_given_back(
    together: str,
) -> None:
    other = StudyStore(together, IDENTITY)
    judged = list[SkipMask]()
    numbers = [claimed(other, SkipMask(LAYERS, (layer,))) for layer in range(2)]
    search = two_at_work(together, judged, "wall", trials=3)
    search.on_event = lambda event: (
        other.finish(numbers.pop(), TOY.trial(SkipMask(LAYERS, (1,))))
        if len(numbers) == 2
        else None
    )
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(search.run, "random")
        for _ in waiting():
            if len(search.judged_trials) == 2 and not numbers[1:]:
                break
        assert not done.done()
        other.release(numbers.pop(), interrupted=False)
        done.result(300)
    assert judged[-1] == SkipMask(LAYERS, (0,))
    assert len(judged) == 2
    assert len(search.judged_trials) == 3


def two_at_work(
    url: str,
    judged: list[SkipMask],
    fidelity: str,
    trials: int = 8,
    listen: TuneListener = lambda event: None,
) -> Search:
    """One of several searches of a toy model in this process. judged: what is judged by any of
    them.
    """

    class Judge:
        def __init__(self) -> None:
            self.fidelity = fidelity

        def judge(self, mask: SkipMask) -> Trial:
            judged.append(mask)
            return TOY.trial(mask, fidelity)

    ledger = StudyStore(url, IDENTITY)
    return Search(
        TOY.problem(), Judge(), ledger, ledger.trials(), listen, perf_counter(), None, trials
    )


@pytest.mark.thorough
def test_four_processes_one_killed_while_it_measures_lose_nothing_and_measure_nothing_twice(
    postgresql: str, tmp_path: Path
) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *map(os.path.abspath, sys.path)])
    database = open_database(postgresql)
    launched = subprocess.Popen(
        [sys.executable, four_workers.__file__, postgresql, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert launched.stdout is not None
        workers: dict[str, str] = json.loads(launched.stdout.readline())
        for _ in (
            waiting()
        ):  # until each has claimed a mask, as the data base has it, and begun to measure it
            trials = trials_in(database)
            running = {
                t.user_attrs["worker"]: t
                for t in trials
                if t.state is OptunaState.RUNNING and not t.user_attrs.get("duplicate_of")
            }
            if len(measured(tmp_path)) == len(running) == 4:
                break
        os.kill(int(workers["victim"].rpartition(":")[2]), signal.SIGKILL)
        (tmp_path / "held").touch()
        for _ in waiting():  # until the dead one is found out
            if trials_in(database)[running[workers["victim"]].number].state is OptunaState.FAIL:
                break
        (tmp_path / "go").touch()  # the slow one had no less time to be taken for dead
        assert launched.wait(300) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)
        launched.wait()

    trials = trials_in(database)
    complete = [t for t in trials if t.state is OptunaState.COMPLETE]
    assert len(complete) == len(set(map(bits, complete))) == four_workers.TRIALS, (
        "the number asked for, each mask once"
    )
    assert all("".join(map(str, t.params.values())) == bits(t) for t in complete), (
        "dashboards see a bit a sub-layer"
    )

    log = measured(tmp_path)
    (lost,) = [mask for worker, mask in log if worker == workers["victim"]]
    counts = Counter(mask for _, mask in log)
    assert counts.pop(lost) == 2, "the dead worker's mask was measured by another one"
    assert set(counts.values()) == {1}, "and no other mask twice"
    assert len(counts) == four_workers.TRIALS - 1
    assert [t.user_attrs["worker"] for t in complete if bits(t) == lost] != [workers["victim"]]
    assert running[workers["slow"]].number in [t.number for t in complete], (
        "a slow measurement is not a dead one"
    )

    others = [t for t in trials if t.state is not OptunaState.COMPLETE]
    duplicates = [t for t in others if "duplicate_of" in t.user_attrs]
    assert len(duplicates) >= 3, "all four proposed the same mask first"
    assert all(bits(t) == bits(trials[t.user_attrs["duplicate_of"]]) for t in duplicates)
    assert [t.number for t in others if t.state is OptunaState.FAIL] == [
        running[workers["victim"]].number
    ]
    assert all(
        "surplus" in t.user_attrs
        for t in others
        if t.state is OptunaState.PRUNED and t not in duplicates
    )
    assert {t.state for t in others} == {OptunaState.PRUNED, OptunaState.FAIL}

    best = min(complete, key=lambda t: t.value)
    for role in ("slow", "third", "fourth"):
        assert json.loads((tmp_path / f"{role}.json").read_text()) == [
            four_workers.TRIALS,
            list(map(int, bits(best))),
        ], "all agree"


def trials_in(database: RDBStorage) -> list[FrozenTrial]:
    """As the data base has them, whatever our own reading of it is."""
    try:
        return database.get_all_trials(database.get_study_id_from_name("skipsearch"))
    except KeyError:  # nobody has begun the study
        return []


def bits(trial: FrozenTrial) -> str:
    return str(trial.user_attrs["mask"])


def measured(folder: Path) -> list[tuple[str, str]]:
    """Worker and mask of each measurement that was begun."""
    log = folder / "measured"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(worker, mask) for worker, mask in map(str.split, lines)]
