"""Cutting prompts into a calibration and a hold-out half that share no text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from skipsearch.errors import TaskError
from skipsearch.tasks.task import Prompt


def stable_key(seed: int, text: str) -> str:
    """A place in an order that depends on the seed and the text alone: not on a file's order, a
    version or a machine.
    """
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def order_prompts(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The prompts in `rank` order, each text once (blank space around it aside)."""
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.text.strip(), prompt)
    return [distinct[text] for text in sorted(distinct, key=lambda text: stable_key(seed, text))]


def split_pool(
    prompts: Iterable[Prompt], calibration: int, holdout: int, seed: int, location: str
) -> tuple[list[Prompt], list[Prompt]]:
    """Two halves from one pool: the front of the order is calibration, its end hold-out, so that
    growth moves none across.

    Too few for both sizes: neither half gives up more than the other has to.
    Raises: TaskError if there are fewer than 2 distinct prompts.
    """
    pool = order_prompts(prompts, seed)
    if len(pool) < 2:
        raise TaskError(
            f"{location}: {len(pool)} distinct prompt{'s' * (len(pool) != 1)}; at least 2 are "
            "needed, "
            "one to search on and one to report on"
        )
    n_holdout = min(holdout, max(len(pool) // 2, len(pool) - calibration))
    n_calibration = min(calibration, len(pool) - n_holdout)
    return pool[:n_calibration], pool[len(pool) - n_holdout :]


def pair_pools(
    calibration_pool: Iterable[Prompt],
    holdout_pool: Iterable[Prompt],
    calibration: int,
    holdout: int,
    seed: int,
    location: str,
) -> tuple[list[Prompt], list[Prompt]]:
    """Two halves from two pools; a text that stands in both goes to the hold-out half alone.

    Raises: TaskError if a half has no prompt.
    """
    held = order_prompts(holdout_pool, seed)
    shared = {prompt.text.strip() for prompt in held}
    searched = [
        prompt
        for prompt in order_prompts(calibration_pool, seed)
        if prompt.text.strip() not in shared
    ]
    for half, found in (("calibration", searched), ("hold-out", held)):
        if not found:
            raise TaskError(
                f"{location}: no prompt for the {half} half; each half needs at least one that the "
                "other lacks"
            )
    return searched[:calibration], held[:holdout]


def shortfall_notes(half: str, prompts: Sequence[Prompt], n_wanted: int) -> list[str]:
    """A note where a half is smaller than asked for."""
    return (
        [f"the task has only {len(prompts)} {half} prompts, instead of {n_wanted}"]
        if len(prompts) < n_wanted
        else []
    )
