r"""Would a recipe for each prompt, or for each range of contexts, be faster than one for the task?

    python tests/benchmarks/recipes_by_prompt.py MODEL --task chat
    python tests/benchmarks/recipes_by_prompt.py MODEL --task humaneval --data he.jsonl --chat

A recipe is chosen on half of a group of segments and priced on the other half, so that a choice
gains nothing by chance. Groups are prompts, kinds of prompt (`category`) and thirds of the context.
Costs are measured once, at the middle context, and recipes are predicted by replay: lookup alone
with every setting, and drafts that skip nothing, the middle third or the middle half of the layers,
after each of some lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from options import make_text_parser

from skipsearch import load_model
from skipsearch.core.mask import SkipMask
from skipsearch.replay.lookup_replay import lookup_grid
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.sweep import sweep, sweep_lookups
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task
from skipsearch.tuning.calibration import build_replay_objective
from skipsearch.tuning.events import Notice
from skipsearch.tuning.objective import ReplayObjective

N_LOOKUPS = 6  # tried before drafts of the model


def main() -> None:
    parser = make_text_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    args = parser.parse_args()
    model = load_model(args.model)
    task = load_task(args.task, data=args.data, chat=args.chat or None)
    prompts = task.calibration[: args.prompts]
    shapes = ("lookup", "skip", "lookup,skip")
    objective = build_replay_objective(
        model,
        make_workload(model, task, prompts),
        lambda event: print(event.sentence) if isinstance(event, Notice) else None,
        shapes=shapes,
    )
    seconds, names = price_recipes(objective)
    segments = objective.replay.segments
    texts = [segments[i].text for i in objective._rounds_without_model().prompt_indices]
    depth = [len(objective.replay.prompt_ids[i]) for i in range(len(segments))]
    thirds = np.searchsorted(np.quantile(depth, [1 / 3, 2 / 3]), depth)
    print(f"{len(names)} recipes, {len(texts)} segments of {len(set(texts))} answers")
    print("| groups | number | gain over one recipe | recipes that groups chose |")
    print("|---|---|---|---|")
    for title, group_of in (
        ("prompts", lambda i: texts[i]),
        ("kinds", lambda i: prompts[texts[i]].category),
        ("thirds of the context", lambda i: int(thirds[i])),
    ):
        report_gain(title, seconds, names, group_of)


def price_recipes(objective: ReplayObjective) -> tuple[np.ndarray, list[str]]:
    """Return predicted seconds [recipes, segments], and the recipes' names."""
    replay, costs = objective.replay, objective.costs
    rounds = objective._rounds_without_model()
    grid = lookup_grid(objective.max_draft)
    options = [objective.propose_lookups((spec,), rounds) for spec in grid]
    parts, names = [sweep_lookups(rounds, options, costs)], [str(spec) for spec in grid]
    n = replay.model.spec.n_layers
    policies = objective.coarse_policies
    lookups = [(), *objective.list_lookups(True)[:N_LOOKUPS]]
    for share in (0, 3, 2):
        layers = range((n - n // share) // 2, (n + n // share) // 2) if share else range(0)
        mask = SkipMask.from_layers(n, layers)
        table = rounds_from_replay(replay(mask))
        for before in lookups:
            proposals = objective.propose_lookups(before, table)
            parts.append(sweep(table, mask, policies, costs, proposals))
            names += [f"{before} skip {mask.n_skipped} {policy}" for policy in policies]
    return np.concatenate(parts), names


def report_gain(
    title: str, seconds: np.ndarray, names: Sequence[str], group_of: Callable[[int], Hashable]
) -> None:
    """Print what a recipe for each group gains; each group is halved twice."""
    n = seconds.shape[1]
    members: dict[Hashable, list[int]] = {}
    for i in range(n):
        members.setdefault(group_of(i), []).append(i)
    halves = [(of_group[::2], of_group[1::2]) for of_group in members.values() if len(of_group) > 1]
    one_s = own_s = 0.0
    chosen = set[str]()
    for seen, unseen in ((0, 1), (1, 0)):
        known = [i for half in halves for i in half[seen]]
        one = int(seconds[:, known].sum(axis=1).argmin())
        for half in halves:
            own = int(seconds[:, half[seen]].sum(axis=1).argmin())
            chosen.add(names[own])
            one_s += float(seconds[one, half[unseen]].sum())
            own_s += float(seconds[own, half[unseen]].sum())
    print(f"| {title} | {len(halves)} | {(one_s / own_s - 1) * 100:+.1f} % | {len(chosen)} |")


if __name__ == "__main__":
    main()
