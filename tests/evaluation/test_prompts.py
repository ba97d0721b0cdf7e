"""Workloads: a task's text as one model is given it."""

from __future__ import annotations

import pytest
from helpers.letters import CHAT, letter_tokenizer
from helpers.tiny import LAYERS

from evaluation.fabricated import drafting, plain
from evaluation.small_search import small_model, small_task
from skipsearch.compiler import compile_profile, provenance
from skipsearch.drafters.skip import Skip
from skipsearch.errors import TaskError
from skipsearch.evaluation.prompts import lengths, shortened, template_sha256, workload
from skipsearch.exits.fixed import Fixed
from skipsearch.mask import SkipMask
from skipsearch.models import ModelAdapter
from skipsearch.recipe import Recipe
from skipsearch.tasks import Prompt
from skipsearch.tuning import identity


def talking_model(chat_template: str | None = CHAT) -> ModelAdapter:
    model = small_model()
    model.tokenizer = letter_tokenizer(chat_template)
    return model


def given(model: ModelAdapter, *, chat: bool) -> list[str]:
    task = small_task(chat=chat)
    return [str(model.tokenizer.decode(ids)) for ids in workload(model, task, task.calibration[:2]).prompts]


def test_requests_go_through_the_template_of_a_chat_model_and_nothing_else_does() -> None:
    assert given(talking_model(), chat=True) == ["<s>user:skip\nai:", "<s>user:draft\nai:"]
    assert given(talking_model(), chat=False) == ["<s>skip", "<s>draft"]
    assert given(talking_model(None), chat=True) == ["<s>skip", "<s>draft"]


def test_the_hash_says_whether_there_was_a_template_and_which() -> None:
    task = small_task(chat=True)
    hashes = [template_sha256(task, letter_tokenizer(template)) for template in (CHAT, CHAT + " ")]
    assert len(set(hashes)) == 2
    assert None not in hashes
    assert template_sha256(task, letter_tokenizer()) is None
    assert template_sha256(small_task(chat=False), letter_tokenizer(CHAT)) is None


def test_profile_and_study_carry_it() -> None:
    model, task = talking_model(), small_task(chat=True)
    expected = template_sha256(task, model.tokenizer)
    assert identity(model, task, "replay", False)["chat_template_sha256"] == expected
    work = workload(model, task, task.holdout)
    seconds = [1.0] * len(work.prompts)
    profile = compile_profile(model, task, work, Recipe((Skip.of(SkipMask(LAYERS, (1,)), 4, Fixed()),)), plain(seconds), drafting(seconds),
                              provenance=provenance("gp", "replay", 0, 1, 1.0))
    assert profile.task.chat_template_sha256 == expected is not None


@pytest.mark.parametrize(("context", "expected"), [
    (None, (3072, 1024)), (4096, (3072, 1024)), (2048, (1024, 1024)), (1024, (512, 512)), (3, (2, 1))])
def test_a_small_context_is_shared_between_prompt_and_answer(context: int | None, expected: tuple[int, int]) -> None:
    task = small_task(max_prompt_tokens=3072, max_new_tokens=1024)
    assert lengths(task, context) == expected
    assert sum(expected) <= (context or 4096)


def test_a_short_prompt_leaves_the_answer_more_than_half() -> None:
    assert lengths(small_task(max_prompt_tokens=20, max_new_tokens=1024), 100) == (20, 80)


def test_a_shorter_answer_is_told_and_generated() -> None:
    model, task = small_model(), small_task(max_new_tokens=200, max_prompt_tokens=200)
    assert shortened(task, model.spec) == [
        "task words generates up to 200 tokens and tiny was made for 256, the prompt included: here up to 128, behind prompts of up to 128"]
    assert workload(model, task, task.calibration).max_new_tokens == 128
    assert shortened(small_task(), model.spec) == []


def test_without_a_tokenizer_or_tokens_there_is_no_workload() -> None:
    task = small_task()
    model = small_model()
    model.tokenizer = None
    with pytest.raises(TaskError, match="tiny has no tokenizer, so the text of task words cannot be given to it: put its tokenizer files"):
        workload(model, task, task.calibration)
    with pytest.raises(TaskError, match="task words has no prompt that this tokenizer turns into tokens"):
        workload(small_model(), task, [Prompt("empty", "")])
