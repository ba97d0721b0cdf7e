"""The search loop: propose a mask, judge it, report it, until budget, trials or masks run out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter, sleep

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.errors import SearchError
from skipsearch.searchers import Searcher, SearchProblem, make_searcher
from skipsearch.tuning.events import Notice, StageProgress, TuneListener
from skipsearch.tuning.objective import Objective
from skipsearch.tuning.study import StudyStore

INITIAL_DESIGN = {"middle": 6, "uniform": 6, "sensitivity": 8}  # masks of each searcher
# Of the time of a search, for the initial design after one mask of each searcher: a large model
# judges few masks a minute.
MAX_INITIAL_SHARE = 0.25
POLL_INTERVAL_S = 0.2  # between two polls, while only other processes still measure masks


FIRST_PROPOSER = "tune"  # of the masks that are judged before those of a searcher


class Search:
    """A search that judges the masks of a searcher and reports trials to searcher and study."""

    def __init__(
        self,
        problem: SearchProblem,
        objective: Objective,
        store: StudyStore | None,
        history: Iterable[Trial],
        on_event: TuneListener,
        started: float,
        limit_s: float | None,
        max_trials: int | None,
    ):
        """Prepare a search. history: the trials of the study. started: from `perf_counter`."""
        self.problem, self.objective = problem, objective
        self.store, self.on_event = store, on_event
        self.started = started
        self.limit_s = limit_s  # seconds of this process since `started`
        self.max_trials = max_trials  # of the study, by all processes together
        # Every judged mask, also those that other processes of a shared study judged. A failed
        # trial that a killed process left does not count: its mask may be judged again.
        self.judged_trials: dict[SkipMask, Trial] = {
            t.mask: t for t in history if t.state is TrialState.COMPLETE
        }
        self.pending: frozenset[SkipMask] = frozenset()  # being measured by other processes

    def run(self, searcher_name: str, first_masks: Iterable[SkipMask] = ()) -> None:
        """Judge the initial design, then proposed masks, until budget, trials or masks run out.

        first_masks: masks that are judged before all others.
        Closes the study. Raises: SearchError if no mask could be judged, or if the study can no
        longer be reached.
        """
        learner = make_searcher(searcher_name, self.problem)
        seeds_itself = searcher_name in INITIAL_DESIGN or getattr(learner, "seeds_itself", False)
        queue = dict.fromkeys(first_masks, FIRST_PROPOSER)
        design = [] if seeds_itself else [*self._initial_masks().items()]
        queue |= design[: len(INITIAL_DESIGN)]
        later = dict(design[len(INITIAL_DESIGN) :])  # are judged only if there is time
        for trial in self.judged_trials.values():
            learner.tell(trial)
        try:
            orphaned = self._sync(learner)
            if self.store and self.store.shared and (self.judged_trials or self.pending):
                self.on_event(
                    Notice(
                        f"searching together: {len(self.judged_trials)} masks judged so far, "
                        f"{len(self.pending)} being judged elsewhere"
                    )
                )
            while not self._is_budget_spent():
                began = perf_counter()
                if self.limit_s and began - self.started > MAX_INITIAL_SHARE * self.limit_s:
                    later = {}
                known = queue | later
                mask = self._next_mask([*orphaned, *known], learner)
                if mask is None and not self.pending:
                    break
                if mask is None:  # the process that measures the last masks may die
                    sleep(POLL_INTERVAL_S)
                else:
                    proposer = known.get(mask) or searcher_name
                    if mask not in known and mask not in orphaned:
                        proposer = str(getattr(learner, "proposer", searcher_name))
                    judged = self.judged_trials.get(mask)
                    if judged := judged or self._evaluate(mask, proposer, began):
                        learner.tell(judged)
                orphaned = self._sync(learner)
        finally:
            if self.store:
                self.store.close()
        if not self.best_trials(1):
            raise SearchError(
                "no mask could be judged before the budget ran out: give it more time (--budget) "
                "or trials"
            )

    def best_trials(self, count: int) -> list[Trial]:
        """Return the `count` best trials, ordered by speedup.

        A speedup is over the baseline of the trial's own process, because the machine may be slower
        when a search is resumed.
        """
        judged = [
            t
            for t in self.judged_trials.values()
            if t.state is TrialState.COMPLETE and math.isfinite(t.seconds_per_token)
        ]
        return sorted(judged, key=lambda t: (-(t.speedup or 0.0), t.seconds_per_token))[:count]

    def _initial_masks(self) -> dict[SkipMask, str]:
        """Return the masks of the initial design, each with the name of its searcher.

        The searchers take turns, so that a design that is cut short has masks of all.
        """
        turns = list[tuple[int, SkipMask, str]]()
        for name, count in INITIAL_DESIGN.items():
            searcher, masks = make_searcher(name, self.problem), list[SkipMask]()
            while len(masks) < count and (mask := searcher.ask(masks)) is not None:
                masks.append(mask)
            turns += [(turn, mask, name) for turn, mask in enumerate(masks)]
        design: dict[SkipMask, str] = {}
        for _, mask, name in sorted(turns, key=lambda entry: entry[0]):
            design.setdefault(mask, name)
        return design

    def _sync(self, searcher: Searcher) -> tuple[SkipMask, ...]:
        """Read the trials of other processes; return masks whose measurement was interrupted."""
        if self.store is None:
            return ()
        update = self.store.poll()
        self.pending = update.pending
        for trial in update.judged:
            if trial.mask not in self.judged_trials:
                self.judged_trials[trial.mask] = trial
                searcher.tell(trial)
        return update.orphaned

    def _next_mask(self, queue: Iterable[SkipMask], searcher: Searcher) -> SkipMask | None:
        """Return the next mask to judge; None if there is none at present, or none any more."""
        n_begun = len(self.judged_trials) + len(self.pending)
        if self.max_trials is not None and n_begun >= self.max_trials:
            return None
        queued = (m for m in queue if m not in self.judged_trials and m not in self.pending)
        return next(queued, None) or searcher.ask(self.pending)

    def _evaluate(self, mask: SkipMask, proposer: str, began: float) -> Trial | None:
        """Judge a mask. Returns None if another process has the mask, or the study is complete."""
        number = None
        # A cheap trial of a journal is not claimed: a killed process loses only this one.
        if self.store and (self.store.shared or self.objective.fidelity != "replay"):
            number = self.store.claim(mask, self.max_trials)
            if number is None:
                return None
        try:
            trial = replace(
                self.objective.judge(mask), searcher=proposer, search_seconds=perf_counter() - began
            )
        except BaseException as error:
            if self.store and number is not None:
                self.store.release(number, interrupted=isinstance(error, KeyboardInterrupt))
            raise
        if self.store and number is None:
            self.store.add(trial)
        elif self.store and number is not None and not self.store.finish(number, trial):
            return None
        self.judged_trials[mask] = trial
        self._report_progress(trial)
        return trial

    def _report_progress(self, trial: Trial) -> None:
        """Report the progress towards the limit that is closer: time or trials."""
        by_time, by_count = (0.0, 1.0), (0.0, 1.0)
        if self.limit_s:
            by_time = perf_counter() - self.started, self.limit_s
        if self.max_trials:
            by_count = float(len(self.judged_trials)), float(self.max_trials)
        done, total = max(by_time, by_count, key=lambda pair: pair[0] / pair[1])
        self.on_event(StageProgress(done, total, trial, next(iter(self.best_trials(1)), None)))

    def _is_budget_spent(self) -> bool:
        """Return whether time or trials ran out; False before the first judged mask."""
        if not self.judged_trials:
            return False
        over_time = self.limit_s is not None and perf_counter() - self.started >= self.limit_s
        return over_time or (
            self.max_trials is not None and len(self.judged_trials) >= self.max_trials
        )
