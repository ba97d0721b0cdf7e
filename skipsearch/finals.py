"""The last of a search: recipes that decode calibration prompts against one another, and who wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skipsearch.decoding import Decoder
from skipsearch.errors import SearchError
from skipsearch.evaluation.contenders import contenders
from skipsearch.evaluation.objectives import ReplayObjective
from skipsearch.evaluation.prompts import Workload
from skipsearch.evaluation.simulate import Prediction
from skipsearch.evaluation.wall import knock_out
from skipsearch.models.spec import ModelAdapter
from skipsearch.recipe import Recipe
from skipsearch.search import Listener, Progress, Raced, Stage
from skipsearch.stats import Price

RACE_PROMPTS = (5, 11)      # of the first round with all finalists, of the second with the faster half
FURTHER = 32                # more prompts, at most, for the two fastest while neither is measurably faster
CHOOSING_PROMPTS = (4, 8, 12, 24)   # the same where replay cannot say which settings are the best, so that more of them are raced


@dataclass(frozen=True)
class Finalist:
    """predicted: speedup by replay; None where replay cannot know. prices: for the guard."""

    recipe: Recipe
    predicted: float | None
    prices: tuple[Price | None, ...] = ()
    folders: tuple[Path, ...] = ()   # where its trained parts lie
    foreseen: Prediction | None = field(default=None, compare=False, repr=False)   # prompt by prompt

    def decoder(self, model: ModelAdapter) -> Decoder:
        return Decoder(model, self.recipe, prices=self.prices, modules=self.folders)


def choosing(kind: str, shape: str, by_replay: ReplayObjective, calibration: Workload, listen: Listener) -> list[Finalist]:
    """The settings to race of a drafter that chooses its masks while it decodes. What replay foresees of their rounds prices them for the
    guard, too."""
    listen(Stage(f"narrowing down the settings of {kind}"))
    plain = by_replay.costs.verify[0]
    found = contenders(kind, shape, by_replay, calibration, lambda done, total: listen(Progress(done, total)))
    if not found:
        raise SearchError(f"{kind} has no setting that skips anything of a model with {by_replay.replay.model.spec.n_layers} layers")
    return [Finalist(c.recipe, plain / c.found.seconds_per_token if c.exact else None, tuple(c.found.prices(plain))) for c in found]


def run_off(model: ModelAdapter, prompts: Workload, finalists: list[Finalist], seed: int, listen: Listener,
            rungs: Sequence[int] = RACE_PROMPTS) -> tuple[Finalist, list[Raced]]:
    """The finalist with the least measured time, on calibration prompts only. What was measured on the first of them stands for all of them
    in the proportion that replay predicts, since recipes differ in which prompts suit them."""
    winner, timings = knock_out(Decoder(model), [f.decoder(model) for f in finalists], prompts, rungs, seed,
                                lambda done, total: listen(Progress(done, total)),
                                [f.foreseen.from_some_to_all if f.foreseen else lambda _: 1.0 for f in finalists],
                                FURTHER)
    raced = [Raced(f.recipe, f.predicted, ours.speedup_over(plain), "calibration", ours.prompts)
             for f, (plain, ours) in zip(finalists, timings, strict=True)]
    for entry in raced:
        listen(entry)
    return finalists[winner], raced
