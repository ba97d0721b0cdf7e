"""While a long prompt is read, others get rounds, and a client that leaves ends the reading."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers.threads import one_thread

from skipsearch.decoding import Decoder, Request
from skipsearch.serve.scheduler import Job, Scheduler

from .tiny_server import LIMITS, RECIPE, model

__all__ = ["one_thread"]
LONG, SHORT = [5, 6, 7, 8] * 50, [5, 6, 7]


def run(cancel_long: bool = False, **limits: Any) -> list[tuple[str, Any]]:
    """Decode a long prompt and a short one. Returns (job, output) in the order of delivery."""
    scheduler = Scheduler(Decoder(model(), RECIPE), replace(LIMITS, prompt_rows=8, **limits))
    delivered: list[tuple[str, Any]] = []
    jobs: dict[str, Job] = {}

    def deliver(name: str, output: Any) -> None:
        delivered.append((name, output))
        if cancel_long and name == "short" and output is None:
            scheduler.cancel(jobs["long"])

    for name, ids in {"long": LONG, "short": SHORT}.items():
        jobs[name] = Job(Request(ids, 3), ids, "key", partial(deliver, name))
    scheduler.submit(list(jobs.values()))
    scheduler.start()
    scheduler.close()
    return delivered


@pytest.mark.parametrize("batch_passes", [False, True])
def test_a_short_prompt_need_not_wait_for_a_long_one(batch_passes: bool) -> None:
    delivered = run(batch_passes=batch_passes)
    assert [name for name, output in delivered if output is None] == ["short", "long"]
    tokens = [
        token for name, out in delivered if name == "long" and out for token in out.chunk.tokens
    ]
    assert tokens == Decoder(model(), RECIPE).generate(LONG, 3).tokens


@pytest.mark.parametrize("batch_passes", [False, True])
def test_a_client_that_leaves_ends_the_reading_of_its_prompt(batch_passes: bool) -> None:
    delivered = run(cancel_long=True, batch_passes=batch_passes)
    assert [output for name, output in delivered if name == "long"] == [None]
