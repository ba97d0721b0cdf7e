"""Workloads: a task's text as one model is given it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.table_model import TableModel
from helpers.tiny import LAYERS
from tuning.small_search import small_model, small_task

from replay.fabricated import drafting, plain
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.decoding.repetition import find_loop_start
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import TaskError
from skipsearch.models import ModelAdapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.workload import (
    Workload,
    make_workload,
    task_warnings,
    template_sha256,
    token_limits,
)
from skipsearch.tasks import Prompt, Task
from skipsearch.timing.interleaved import PairedTimings
from skipsearch.tuning.driver import study_fingerprint
from skipsearch.tuning.profile_builder import build_profile, make_provenance


def talking_model(chat_template: str | None = CHAT_TEMPLATE) -> ModelAdapter:
    model = small_model()
    model.tokenizer = letter_tokenizer(chat_template)
    return model


def given(model: ModelAdapter, *, chat: bool) -> list[str]:
    task = small_task(chat=chat)
    return [
        str(model.tokenizer.decode(ids))
        for ids in make_workload(model, task, task.calibration[:2]).prompt_ids
    ]


def test_requests_go_through_the_template_of_a_chat_model_and_nothing_else_does() -> None:
    assert given(talking_model(), chat=True) == ["<s>user:skip\nai:", "<s>user:draft\nai:"]
    assert given(talking_model(), chat=False) == ["<s>skip", "<s>draft"]
    assert given(talking_model(None), chat=True) == ["<s>skip", "<s>draft"]


def test_a_warning_says_that_a_model_without_a_template_gets_requests_unchanged() -> None:
    requests, texts = small_task(chat=True), small_task(chat=False)
    assert task_warnings(requests, talking_model(None)) == [
        "the prompts of task words are requests to a chat model, and tiny has no chat template: "
        "it gets them unchanged, as text to continue"
    ]
    assert task_warnings(requests, talking_model()) == []
    assert task_warnings(texts, talking_model(None)) == []
    assert task_warnings(texts, talking_model()) == []
    [advice] = task_warnings(texts, talking_model(), is_file=True)
    assert "--chat" in advice
    assert task_warnings(texts, talking_model(None), is_file=True) == []
    tokenless = small_model()
    tokenless.tokenizer = None
    assert task_warnings(requests, tokenless) == []


def test_the_hash_says_whether_there_was_a_template_and_which() -> None:
    task = small_task(chat=True)
    hashes = [
        template_sha256(task, letter_tokenizer(template))
        for template in (CHAT_TEMPLATE, CHAT_TEMPLATE + " ")
    ]
    assert len(set(hashes)) == 2
    assert None not in hashes
    assert template_sha256(task, letter_tokenizer()) is None
    assert template_sha256(small_task(chat=False), letter_tokenizer(CHAT_TEMPLATE)) is None


def test_profile_and_study_carry_it() -> None:
    model, task = talking_model(), small_task(chat=True)
    expected = template_sha256(task, model.tokenizer)
    assert study_fingerprint(model, task, "replay", False)["chat_template_sha256"] == expected
    work = make_workload(model, task, task.holdout)
    seconds = [1.0] * len(work.prompt_ids)
    profile = build_profile(
        model,
        task,
        work,
        Recipe((Skip.from_mask(SkipMask(LAYERS, (1,)), 4, Fixed()),)),
        PairedTimings(plain(seconds), drafting(seconds)),
        provenance=make_provenance("gp", "replay", 0, 1, 1.0),
    )
    assert profile.task.chat_template_sha256 == expected is not None


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (None, (3072, 1024)),
        (4096, (3072, 1024)),
        (2048, (1024, 1024)),
        (1024, (512, 512)),
        (3, (2, 1)),
    ],
)
def test_a_small_context_is_shared_between_prompt_and_answer(
    context: int | None, expected: tuple[int, int]
) -> None:
    task = small_task(max_prompt_tokens=3072, max_new_tokens=1024)
    assert token_limits(task, context) == expected
    assert sum(expected) <= (context or 4096)


def test_a_short_prompt_leaves_the_answer_more_than_half() -> None:
    assert token_limits(small_task(max_prompt_tokens=20, max_new_tokens=1024), 100) == (20, 80)


def test_a_shorter_answer_is_told_and_generated() -> None:
    model, task = small_model(), small_task(max_new_tokens=200, max_prompt_tokens=200)
    assert task_warnings(task, model) == [
        "task words generates up to 200 tokens and tiny was made for 256, the prompt included: "
        "here up to 128, behind prompts of up to 128"
    ]
    assert make_workload(model, task, task.calibration).max_new_tokens == 128
    assert task_warnings(small_task(), model) == []


def test_prompts_that_lose_their_beginning_are_counted() -> None:
    model, task = talking_model(), small_task(max_prompt_tokens=6)
    lengths = [len(ids) for ids in make_workload(model, small_task(), all_prompts(task)).prompt_ids]
    n_cut = sum(length > 6 for length in lengths)
    assert 0 < n_cut < len(lengths)
    [warning] = task_warnings(task, model)
    assert f"{n_cut} of the {len(lengths)} prompts of words are longer than 6" in warning
    assert f"the longest has {max(lengths)}" in warning
    assert not task_warnings(small_task(max_prompt_tokens=max(lengths)), model)


def all_prompts(task: Task) -> tuple[Prompt, ...]:
    return task.calibration + task.holdout


def test_without_a_tokenizer_or_tokens_there_is_no_workload() -> None:
    task = small_task()
    model = small_model()
    model.tokenizer = None
    with pytest.raises(
        TaskError,
        match="tiny has no tokenizer, so the text of task words cannot be given to it: put its "
        "tokenizer files",
    ):
        make_workload(model, task, task.calibration)
    with pytest.raises(
        TaskError, match="task words has no prompt that this tokenizer turns into tokens"
    ):
        make_workload(small_model(), task, [Prompt("empty", "")])


def count_tokens(generate: Any, counts: list[int]) -> Any:
    """Wrap `Decoder.generate` so that it notes how many tokens each call decoded."""

    def counting(*arguments: Any, **options: Any) -> Any:
        answer = generate(*arguments, **options)
        counts.append(len(answer.tokens))
        return answer

    return counting


def test_a_looping_answer_is_measured_and_replayed_up_to_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TableModel(vocab=16)
    prompts = ((3,), (1, 4), (2, 0, 1))
    work = Workload(tuple("abc"), prompts, 200, "loop", SamplingParams())
    mask = SkipMask.from_sublayers(model.spec.n_layers, [3])
    plain_decoder, drafter = Decoder(model), Decoder(model, mask, draft_length=3)
    whole = [plain_decoder.generate(p, 200).tokens for p in prompts]
    starts = [find_loop_start(text) for text in whole]
    assert any(start is not None for start in starts)
    decoded = list[int]()  # tokens of each decoding
    for decoder in (plain_decoder, drafter):
        monkeypatch.setattr(decoder, "generate", count_tokens(decoder.generate, decoded))
    stats = DecodeStats()
    for i, start in enumerate(starts):
        decoded.clear()
        answers = [work.generate(decoder, i, seed=0) for decoder in (plain_decoder, drafter)]
        assert len(decoded) == (2 if start is None else 3), "a loop is decoded once"
        before = whole[i] if start is None else whole[i][: max(1, start)]
        assert [answer.tokens for answer in answers] == [before, before]
        assert answers[0].finish_reason == ("length" if start is None else "loop")
        assert Replay(model, prompts[i : i + 1], 200, "loop").continuations == [before]
        stats += answers[1].stats
    assert 0 < stats.accepted < stats.drafted
