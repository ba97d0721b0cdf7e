"""A task leaves calibration prompts out of trainings, so that trained drafts are judged on them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tuning.small_search import small_task

from skipsearch.tasks import Prompt
from skipsearch.tasks.task import MAX_UNSEEN, MIN_UNSEEN


@given(st.integers(0, 200))
def test_no_training_reads_the_first_third_of_the_calibration_prompts(n_prompts: int) -> None:
    prompts = tuple(Prompt(f"p/{i}", f"text {i}") for i in range(n_prompts))
    task = replace(small_task(), calibration=prompts)
    assert task.unseen + task.trainable == prompts
    assert len(task.unseen) in (0, min(MAX_UNSEEN, n_prompts // 3))
    assert bool(task.unseen) == (n_prompts >= 3 * MIN_UNSEEN)
    assert task.keep_unseen().calibration == (task.unseen or prompts)
    assert task.keep_unseen().holdout == task.holdout
