"""Time the steps of a trained draft while it decodes.

The latency table does not have such a step: it runs parts that the model does not have, in several
calls of the engine.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

import numpy as np

from skipsearch.core.cost_model import Costs, TimedDraftCosts
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.replay.replay import Replay
from skipsearch.replay.trained_replay import TrainedDraft

PROMPTS = 3  # calibration prompts that are decoded
TOKENS = 32  # after each of them
DRAFT_LENGTHS = (1, 4)  # a step is the difference of both
REPEATS = 3


def time_draft_steps(draft: TrainedDraft, reading: Reading, replay: Replay, costs: Costs) -> Costs:
    """Return the costs of a draft whose steps were timed.

    Plain decoding and drafts of two lengths decode the same prompts in turn. costs: price the
    verify passes. They also give the unit: times are scaled so that a round of plain decoding takes
    as long as there.
    """
    decoders = [Decoder(replay.model, draft_forced=False)]
    for length in DRAFT_LENGTHS:
        recipe = Recipe((draft.make_spec(DraftPolicy(length), reading),))
        decoders.append(Decoder(replay.model, recipe, module_folders=draft.folders))
    sampling = asdict(replay.sampling)
    round_s, drafted = ([list[float]() for _ in decoders] for _ in range(2))
    for _ in range(REPEATS):
        for prompt in replay.prompt_ids[:PROMPTS]:
            for i, decoder in enumerate(decoders):
                stats = decoder.generate(prompt, TOKENS, ignore_eos=True, **sampling).stats
                if stats.rounds:
                    round_s[i].append(stats.decode_seconds / stats.rounds)
                    drafted[i].append(stats.drafted / stats.rounds)
    if not all(round_s):  # the context has no place for a draft
        return costs
    scale = costs.verify[0] / median(round_s[0])
    lengths = np.array([np.mean(counts) for counts in drafted[1:]])  # the last drafts are shorter
    counts = range(DRAFT_LENGTHS[-1] + 1)
    verify_s = np.interp(
        lengths, counts, [costs.verify_after_draft_seconds(count, 0) for count in counts]
    )
    draft_s = scale * np.array([median(times) for times in round_s[1:]]) - verify_s
    step_s = max(0.0, float((draft_s[1] - draft_s[0]) / (lengths[1] - lengths[0])))
    first_step_s = max(0.0, float(draft_s[0] - (lengths[0] - 1) * step_s))
    return TimedDraftCosts.from_costs(costs, first_step_s, step_s)
