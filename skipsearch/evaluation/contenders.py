"""Settings of drafters that choose their masks while they decode, narrowed down to those that a race should decide between.

`asd` chooses one mask for a prompt, so replay judges it. So does the first plan of `clasp`, which tells how much to skip and how to draft;
the race decides how often to plan. What `swift` finds depends on the stream, so it reads calibration prompts for each share of
sub-layers, and replay says how to draft under what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from skipsearch.decoding import Decoder
from skipsearch.drafters.asd import ASD, PromptCosines
from skipsearch.drafters.choosing import ChoosingDrafter, sequential
from skipsearch.drafters.clasp import CLaSp
from skipsearch.drafters.swift import SWIFT, SWIFTDrafter, Tree
from skipsearch.errors import MaskError
from skipsearch.evaluation.chosen import Masks, OneMaskEach, read_prompt
from skipsearch.evaluation.objectives import Found, ReplayObjective
from skipsearch.evaluation.prompts import Workload
from skipsearch.exits import DraftPolicy, make_exit
from skipsearch.mask import SkipMask
from skipsearch.recipe import DrafterSpec, Recipe

JUDGED = 32                  # prompts that masks of their own are replayed on
FIRST_JUDGED = 8             # of these, prompts that all settings are replayed on; the better quarter goes on to the others
FEWEST = 4                   # settings that go on at least
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8)   # of layers or sub-layers, that clasp is tried with; the paper skips half to 60 %
ONCE = 100_000               # rounds: no request lasts so long, so its first plan is its only one
INTERVALS = (ONCE, 32, 16, 8, 4, 2)  # rounds, of the best plans; all others are raced with the first and the fourth
QUANTILES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)   # of the cosines of all prompts, that become thresholds of asd, beside the published one
PUBLISHED_THRESHOLD = 0.985
EVERY, KEPT = (0, 2, 3, 4), (1, 2)
RATIOS = (0.45, 0.6, 0.75, 0.85)     # of swift; the first is the published one
STREAM = 24                  # prompts that it searches on for each ratio
WINDOWS = ((16, 1), (32, 1), (16, 4))   # (tokens that a mask is tried on, rounds from trial to trial)
TREE = Tree(thresholds=(0.8, 0.5), widths=(1, 2, 3))   # tried with the best ratio; the published widths go up to 10
TOLERANCE, TRIALS = 60, 200  # of its stop rules, since a search must end within the prompts that anybody measures on

Progress = Callable[[int, int], None]
Setting = TypeVar("Setting", bound=Hashable)


@dataclass(frozen=True)
class Contender:
    """A recipe to race. found: what replay predicts of it, or of the same under one mask. exact: whether it is of this very recipe."""

    recipe: Recipe
    found: Found
    exact: bool


def contenders(kind: str, shape: str, objective: ReplayObjective, calibration: Workload, progress: Progress) -> list[Contender]:
    """The most promising settings of one of `CHOOSING`, best first as far as that is known. shape: the kind alone, or behind lookup."""
    return list({"asd": _asd, "clasp": _clasp, "swift": _swift}[kind](shape, objective, calibration, progress))


def _asd(shape: str, objective: ReplayObjective, calibration: Workload, progress: Progress) -> Iterator[Contender]:
    each, model = OneMaskEach(objective, JUDGED), objective.replay.model
    cosines: dict[int, PromptCosines] = {}
    for done, number in enumerate(each.prompts):
        cosines[number] = PromptCosines(ASD(draft_length=1, exit=make_exit("fixed")), model.spec.n_layers,
                                        sequential(model))
        read_prompt(model, cosines[number], objective.replay.prompts[number])
        progress(done, 2 * len(each.prompts))
    known = np.array([c.sums for c in cosines.values()]) / np.array([[c.rows] for c in cosines.values()])
    thresholds = sorted({PUBLISHED_THRESHOLD, *(min(1.0, max(0.0, round(float(t), 4))) for t in np.quantile(known, QUANTILES))})

    def spec(setting: tuple[float, int, int]) -> Callable[[DraftPolicy], ASD]:
        return lambda policy: ASD(threshold=setting[0], every=setting[1], keep_last=setting[2], draft_length=policy.draft_length,
                                  exit=policy.exit)

    def masks(setting: tuple[float, int, int], numbers: Sequence[int]) -> Masks:
        return {p: cosines[p].mask(spec(setting)(DraftPolicy(1))) for p in numbers}

    settings = [s for s in product(thresholds, EVERY, KEPT) if any(mask.n_skipped for mask in masks(s, each.prompts).values())]
    for found in _narrowed(each, settings, masks, spec, shape, progress):
        yield Contender(found.recipe, found, exact=True)


def _clasp(shape: str, objective: ReplayObjective, calibration: Workload, progress: Progress) -> Iterator[Contender]:
    model, each = objective.replay.model, OneMaskEach(objective, JUDGED)
    units: dict[str, int] = {"layer": model.spec.n_layers, "sublayer": 2 * model.spec.n_layers}
    settings = list(dict.fromkeys((unit, min(count - 1, max(1, round(share * count))))
                                  for unit, count in units.items() for share in SHARES))

    def spec(setting: tuple[str, int], interval: int = ONCE) -> Callable[[DraftPolicy], CLaSp]:
        unit, skip = setting
        return lambda policy: CLaSp(skip=skip, unit=unit, interval=interval, draft_length=policy.draft_length,  # type: ignore[arg-type]
                                    exit=policy.exit)

    try:
        spec(("sublayer", 1))(DraftPolicy(1)).build(model, [])
    except MaskError:   # a parallel residual
        settings = [s for s in settings if s[0] == "layer"]
    planned: dict[tuple[tuple[str, int], int], SkipMask] = {}

    def masks(setting: tuple[str, int], numbers: Sequence[int]) -> Masks:
        drafter = spec(setting)(DraftPolicy(1)).build(model, [])
        assert isinstance(drafter, ChoosingDrafter)
        for p in numbers:
            if (setting, p) not in planned:
                planned[setting, p] = read_prompt(model, drafter.policy(), objective.replay.prompts[p])
        return {p: planned[setting, p] for p in numbers}

    for rank, found in enumerate(_narrowed(each, settings, masks, spec, shape, progress)):
        last = found.recipe.drafters[-1]
        for interval in INTERVALS if not rank else (INTERVALS[0], INTERVALS[3]):
            again = last.model_copy(update={"interval": interval})
            yield Contender(Recipe((*found.recipe.drafters[:-1], again)), found, exact=interval == ONCE)


def _narrowed(each: OneMaskEach, settings: Sequence[Setting], masks: Callable[[Setting, Sequence[int]], Masks],
              spec: Callable[[Setting], Callable[[DraftPolicy], DrafterSpec]], shape: str, progress: Progress) -> list[Found]:
    """The best settings with the best draft policy for each, best first."""
    some = each.prompts[::max(1, len(each.prompts) // FIRST_JUDGED)]
    seconds: dict[Setting, float] = {}
    for done, setting in enumerate(settings):
        seconds[setting] = each.best(masks(setting, some), spec(setting), shape).seconds_per_token
        progress(done, 2 * len(settings))
    left = sorted(settings, key=seconds.__getitem__)[:max(FEWEST, len(settings) // 4)]
    for done, setting in enumerate(left):
        seconds[setting] = each.best(masks(setting, each.prompts), spec(setting), shape).seconds_per_token
        progress(len(left) + done, 2 * len(left))
    best = sorted(left, key=seconds.__getitem__)[:FEWEST]
    return [each.best(masks(setting, each.prompts), spec(setting), shape, fine=True) for setting in best]


def _swift(shape: str, objective: ReplayObjective, calibration: Workload, progress: Progress) -> Iterator[Contender]:
    model, before = objective.replay.model, "lookup,skip" if shape.startswith("lookup,") else "skip"
    found: list[tuple[float, Found]] = []
    for nth, ratio in enumerate(RATIOS):
        search = _swift_spec(ratio, WINDOWS[0], DraftPolicy(8, make_exit("confidence", threshold=0.5)))
        decoder = Decoder(model, Recipe((search,)))
        drafter = decoder.loop.drafters[0][1]
        assert isinstance(drafter, SWIFTDrafter)
        if not drafter.count:
            continue
        count = min(STREAM, len(calibration.prompts))
        for p in range(count):
            calibration.generate(decoder, p, p)
            progress(nth * count + p, len(RATIOS) * count)
        found.append((ratio, objective.best_recipe(drafter.stream.mask, before, fine=True, siblings=False)))
    for rank, (ratio, of_ratio) in enumerate(sorted(found, key=lambda pair: pair[1].seconds_per_token)):
        *lookups, last = of_ratio.recipe.drafters
        specs = [_swift_spec(ratio, window, DraftPolicy(last.draft_length, last.exit)) for window in WINDOWS]  # type: ignore[attr-defined]
        for spec in specs if rank else [*specs, specs[0].model_copy(update={"tree": TREE})]:
            yield Contender(Recipe((*lookups, spec)), of_ratio, exact=False)


def _swift_spec(ratio: float, window: tuple[int, int], policy: DraftPolicy) -> SWIFT:
    return SWIFT(skip_ratio=ratio, window=window[0], interval=window[1], tolerance=TOLERANCE, most_trials=TRIALS,
                 draft_length=policy.draft_length, exit=policy.exit)
