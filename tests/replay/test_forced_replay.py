"""Replay under a constraint: its text is that of decoding, and forced tokens are counted alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from helpers.costs import fake_costs, made_up_costs

from skipsearch.core.constraint import Constraint
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.engine import load_model
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import rounds_without_model
from skipsearch.replay.simulate import simulate
from skipsearch.replay.workload import Workload
from skipsearch.tuning.calibration import build_replay_objective
from skipsearch.tuning.events import ignore_event

__all__ = ["made_up_costs"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["module", "class"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint(json_schema=SCHEMA)
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def model() -> ModelAdapter:
    return load_model("demo", engine="lean", dtype="float32")


@pytest.fixture(scope="module")
def workload(model: ModelAdapter) -> Workload:
    texts = ("def main(", "class Parser:\n", "import os\n\n", "# A list of")
    ids = tuple(tuple(model.tokenizer(text).input_ids) for text in texts)
    return Workload(texts, ids, NEW_TOKENS, None, SamplingParams(), CONSTRAINT)


def test_the_text_of_replay_is_that_of_decoding(model: ModelAdapter, workload: Workload) -> None:
    replay = Replay(model, workload.prompt_ids, NEW_TOKENS, None, constraint=CONSTRAINT)
    for ids, text in zip(workload.prompt_ids, replay.continuations, strict=True):
        result = Decoder(model).generate(Request(ids, NEW_TOKENS, constraint=CONSTRAINT))
        assert result.tokens == text
        jsonschema.validate(json.loads(result.text or ""), SCHEMA)


@pytest.mark.usefixtures("made_up_costs")
def test_a_simulation_counts_the_rounds_of_forced_tokens_as_decoding_does(
    model: ModelAdapter, workload: Workload
) -> None:
    objective = build_replay_objective(
        model, workload, ignore_event, shapes=("lookup", "skip", "lookup,skip")
    )
    assert objective.forced is not None
    replay = objective.replay
    rounds = rounds_without_model(replay.continuations, replay.token_budgets)
    proposals = [objective.forced(rounds.prompt_indices)]
    predicted = simulate(rounds, None, None, fake_costs(model), proposals).stats
    decoder = Decoder(model)
    counted = sum(
        (workload.generate(decoder, p, 0).stats for p in range(len(workload.prompt_ids))),
        DecodeStats(),
    )
    assert (predicted.rounds, predicted.accepted) == (counted.rounds, counted.accepted)
    assert predicted.accepted > 0


@pytest.mark.usefixtures("made_up_costs")
def test_predicted_recipes_count_their_own_drafters_alone(
    model: ModelAdapter, workload: Workload
) -> None:
    objective = build_replay_objective(
        model, workload, ignore_event, shapes=("lookup", "skip", "lookup,skip")
    )
    best = objective.best_lookup()
    assert best.prediction is not None
    assert len(best.prediction.stats.by_drafter) == len(best.drafter_costs) == 1
    without = build_replay_objective(
        model, replace(workload, constraint=None), ignore_event, shapes=("lookup",)
    )
    assert without.forced is None
