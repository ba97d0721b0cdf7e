"""The task `chat`: requests as people type them to an assistant, which come with skipsearch."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer

from skipsearch.replay.workload import render_prompt, template_sha256
from skipsearch.tasks import Prompt, Task, data_folder, load_task, task_files, task_names
from skipsearch.tasks.manifest import JsonlSource, read_manifest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"  # samples of the published files, where a developer has them
PER_CATEGORY = {"write": 25, "answer": 25, "extract": 25, "code": 25, "reason": 25, "rewrite": 25}
PER_CATEGORY |= {"read": 10}


@pytest.fixture(scope="module")
def chat() -> Task:
    return load_task("chat")


@pytest.fixture(scope="module")
def prompts(chat: Task) -> tuple[Prompt, ...]:
    return chat.calibration + chat.holdout


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs_of_words(text: str, length: int) -> set[str]:
    """Return all sequences of `length` words of a text."""
    words = words_of(text)
    return {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def test_it_is_160_distinct_requests_each_with_an_id_of_its_own(
    prompts: tuple[Prompt, ...],
) -> None:
    assert len(prompts) == len({p.text for p in prompts}) == len({p.id for p in prompts}) == 160


def test_96_are_for_the_search_and_64_for_the_measurement(chat: Task) -> None:
    assert (len(chat.calibration), len(chat.holdout), chat.notes) == (96, 64, ())
    assert {p.text for p in chat.calibration}.isdisjoint(p.text for p in chat.holdout)


def test_each_category_has_three_of_five_requests_in_the_calibration_half(chat: Task) -> None:
    calibration, holdout = (
        Counter(p.category for p in half) for half in (chat.calibration, chat.holdout)
    )
    assert calibration + holdout == PER_CATEGORY
    assert all(calibration[c] * 5 == total * 3 for c, total in PER_CATEGORY.items())


def test_its_categories_are_none_of_those_that_bench_counts_as_one() -> None:
    from skipsearch.bench.bench_prompts import spec_bench_category

    assert [spec_bench_category(category) for category in PER_CATEGORY] == list(PER_CATEGORY)


def test_answers_are_greedy_and_of_up_to_256_tokens(chat: Task) -> None:
    assert (chat.max_new_tokens, chat.sampling.temperature, chat.chat) == (256, 0.0, True)


def test_requests_have_from_one_line_to_300_words(prompts: tuple[Prompt, ...]) -> None:
    lengths = sorted(len(p.text.split()) for p in prompts)
    assert lengths[0] < 8
    assert 25 < lengths[len(lengths) // 2] < 60
    assert 200 < lengths[-1] <= 300


def test_no_two_requests_are_alike(prompts: tuple[Prompt, ...]) -> None:
    """At most a quarter of the words of two requests together are words of both."""
    vocabularies = [set(words_of(p.text)) for p in prompts]
    for index, one in enumerate(vocabularies):
        for other in vocabularies[:index]:
            assert len(one & other) <= len(one | other) / 4, (one, other)


def test_both_halves_have_german_french_and_spanish(chat: Task) -> None:
    letters = {"German": "üß", "French": "àî", "Spanish": "¿"}
    for half in (chat.calibration, chat.holdout):
        used = set("".join(p.text for p in half))
        assert all(used & set(some) for some in letters.values())


def test_a_chat_model_gets_each_request_as_a_users_turn_in_its_template(chat: Task) -> None:
    tokenizer = letter_tokenizer(CHAT_TEMPLATE)
    for prompt in chat.calibration[:10]:
        rendered = render_prompt(chat, tokenizer, prompt)
        assert rendered == f"<s>user:{prompt.text}\nai:"
    assert template_sha256(chat, tokenizer) is not None


def test_a_base_model_gets_each_request_unchanged(chat: Task) -> None:
    prompt = chat.calibration[0]
    assert render_prompt(chat, letter_tokenizer(), prompt) == prompt.text
    assert template_sha256(chat, letter_tokenizer()) is None


def test_it_loads_without_a_network(monkeypatch: pytest.MonkeyPatch, chat: Task) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the task opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_task("chat") == chat
    assert all(file.is_relative_to(data_folder() / "chat") for file in task_files("chat"))
    assert isinstance(read_manifest(data_folder() / "chat" / "task.yaml").source, JsonlSource)


@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not a checkout")
@pytest.mark.parametrize("task", task_names())
def test_a_wheel_has_every_file_of_every_task(task: str) -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    files = described["tool"]["setuptools"]["data-files"]
    assert files[f"share/skipsearch/calibration_data/{task}"] == [f"calibration_data/{task}/*"]


@pytest.mark.skipif(
    not DATA.is_dir(), reason="no samples of the published files beside the repository"
)
def test_it_quotes_no_published_benchmark(prompts: tuple[Prompt, ...]) -> None:
    """No eight words in a row are also in a published file."""
    ours = set().union(*(runs_of_words(p.text, 8) for p in prompts))
    for path in DATA.glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            for text in texts_in(json.loads(line)):
                assert ours.isdisjoint(runs_of_words(text, 8)), path.name
