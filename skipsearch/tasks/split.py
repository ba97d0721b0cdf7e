"""Split prompts into calibration and hold-out, which share no text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from skipsearch.errors import TaskError
from skipsearch.tasks.task import Prompt

MIN_REQUEST_LENGTH = 80  # characters of a request that a later one may begin with


def stable_key(seed: int, text: str) -> str:
    """Return a sort key that depends on the seed and the text alone.

    So the order does not depend on that of a file, a version or a machine.
    """
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def order_prompts(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """Return the prompts in the order of `stable_key`, each text once.

    Texts that differ only in surrounding white space count as equal. Requests of one conversation
    come together, at the place of the first.
    """
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.text.strip(), prompt)
    first = find_first_requests(distinct.values())
    order = {text: (stable_key(seed, first[text]), stable_key(seed, text)) for text in distinct}
    return [distinct[text] for text in sorted(distinct, key=order.__getitem__)]


def find_first_requests(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return the first request of the conversation of each prompt, by its text.

    A later request of a conversation begins with an earlier one, as an agent sends it. Texts of
    fewer than MIN_REQUEST_LENGTH characters are no such beginning.
    """
    # `to_plain_text` writes "user: " before a user's first turn, unless it is the only one.
    requests = {
        p.text.strip(): p.text.strip().removeprefix("user: " if p.turns else "") for p in prompts
    }
    first, root = dict[str, str](), ""
    for text in sorted(requests, key=requests.__getitem__):
        if len(root) < MIN_REQUEST_LENGTH or not requests[text].startswith(root):
            root = requests[text]
        first[text] = root
    return first


def split_pool(
    prompts: Iterable[Prompt], calibration: int, holdout: int, seed: int, location: str
) -> tuple[list[Prompt], list[Prompt]]:
    """Split one pool: the front of the order is calibration, its end is hold-out.

    So growth of the pool moves no prompt from one split to the other. If there are too few prompts
    for both sizes, they are divided evenly, as far as the sizes allow. A conversation whose
    requests would be in both splits is in hold-out alone, unless it is the only one.

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
    front, back = pool[:n_calibration], pool[len(pool) - n_holdout :]
    first = find_first_requests(pool)
    held_out = {first[prompt.text.strip()] for prompt in back}
    return [p for p in front if first[p.text.strip()] not in held_out] or front, back


def pair_pools(
    calibration_pool: Iterable[Prompt],
    holdout_pool: Iterable[Prompt],
    calibration: int,
    holdout: int,
    seed: int,
    location: str,
) -> tuple[list[Prompt], list[Prompt]]:
    """Return calibration and hold-out from two pools; a text that is in both goes to hold-out only.

    Raises: TaskError if a split has no prompt.
    """
    held_out = order_prompts(holdout_pool, seed)
    shared = {prompt.text.strip() for prompt in held_out}
    searched = [
        prompt
        for prompt in order_prompts(calibration_pool, seed)
        if prompt.text.strip() not in shared
    ]
    for split, pool in (("calibration", searched), ("hold-out", held_out)):
        if not pool:
            raise TaskError(
                f"{location}: no prompt for the {split} split; each split needs at least one that "
                "the other lacks"
            )
    return searched[:calibration], held_out[:holdout]


def shortfall_notes(split: str, prompts: Sequence[Prompt], n_wanted: int) -> list[str]:
    """Return a note if a split is smaller than wanted."""
    return (
        [f"the task has only {len(prompts)} {split} prompts, instead of {n_wanted}"]
        if len(prompts) < n_wanted
        else []
    )
