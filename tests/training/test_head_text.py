"""Which text a draft head is trained on: whose requests, in which proportions, and how much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning.small_search import small_model, small_task

from skipsearch.errors import ModuleError
from skipsearch.models import ModelAdapter, load_adapter
from skipsearch.models.chat.chat_text import encode_text
from skipsearch.replay import reference_text
from skipsearch.replay.generate_together import Continuation
from skipsearch.replay.reference_text import TextSettings, TextStore
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task
from skipsearch.training import head_text
from skipsearch.training.distill_batch import TeacherTargets
from skipsearch.training.feature_file import NO_ROW, NO_TEXT, FeatureFile, Features, StoredText
from skipsearch.training.head_text import (
    USER_SHARE,
    WAVE,
    AnsweredText,
    HeadRequest,
    HeadRequests,
    TextLimits,
)

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_model() -> ModelAdapter:
    model = load_adapter("demo", device="cpu", engine="hf")
    model.tokenizer.chat_template = TEMPLATE
    return model


def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Replace the requests that a model writes; return (first, count) of those that it was asked
    for.
    """
    asked = list[tuple[int, int]]()

    def write(self: HeadRequests, first: int, count: int) -> list[HeadRequest]:
        asked.append((first, count))
        return [HeadRequest((n,), self.own[0].settings) for n in range(first, first + count)]

    monkeypatch.setattr(HeadRequests, "_write_requests", write)
    return asked


def test_without_data_half_are_instructions_and_half_the_models_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, requests = written(monkeypatch), HeadRequests(chat_model(), [], None, False, 0.0, 0)
    n_own, half = len(requests.own), WAVE // 2
    assert 32 < n_own < 64, "those that fit into half a window"
    n_mixed = -(-n_own // half)
    waves = [requests.list_wave(number) for number in range(n_mixed + 1)]
    assert {len(wave) for wave in waves} == {WAVE}
    assert asked[:2] == [(0, half), (half, WAVE - (n_own - half))]
    assert asked[-1] == (n_mixed * WAVE - n_own, WAVE), "then all are the model's own"
    every = [request.tokens for wave in waves for request in wave]
    assert len(every) == len(set(every))
    assert requests.list_wave(1) == waves[1], "a wave depends on its number alone"


def test_data_shifts_the_proportion_towards_the_users_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"prompt": f"question number {i}"}) for i in range(200)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    asked, model = written(monkeypatch), chat_model()
    requests = HeadRequests(model, [tmp_path / "log.jsonl"], None, False, 0.0, 0)
    n_given = len(requests.given)
    assert n_given == 64, "what `tune --task log.jsonl --modules` judges on is not trained on"
    first, second = requests.list_wave(0), requests.list_wave(1)
    given = {request.tokens for request in requests.given}
    assert sum(r.tokens in given for r in first) == USER_SHARE == 3 * WAVE // 4
    assert sum(r.tokens in given for r in second) == n_given - USER_SHARE
    assert not {r.tokens for r in first} & {r.tokens for r in second}
    assert asked[0] == (0, WAVE // 8)
    assert not any(r.tokens in given for r in requests.list_wave(n_given // USER_SHARE + 1))
    assert all("<|user|>question" in decode(model, tokens) for tokens in given)


def test_prompts_on_which_trained_drafts_are_judged_are_no_requests(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"def f{i}(x):"}) for i in range(60)]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows), "utf-8")
    task, model = load_task(tmp_path / "asked.jsonl"), chat_model()
    requests = HeadRequests(model, [tmp_path / "asked.jsonl"], None, False, 0.0, 0)
    asked = [decode(model, request.tokens) for request in requests.given]
    assert len(asked) == len(task.trainable) < len(task.calibration)
    assert not [p for p in task.unseen if any(p.text in request for request in asked)]


def test_prompts_that_a_template_rendered_are_not_rendered_again(tmp_path: Path) -> None:
    model = chat_model()
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    rows = [json.dumps({"prompt": f"<|user|>question {i}<|assistant|>"}) for i in range(4)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    requests = HeadRequests(model, [tmp_path / "log.jsonl"], None, False, 0.0, 0)
    assert all(decode(model, r.tokens).count("<|assistant|>") == 1 for r in requests.given)
    assert requests._openings
    assert not any("<|user|>" in text for text in requests._openings), "no request begins so"


def test_text_is_read_and_no_requests_are_added(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text, and then more of it; " * 200)
    requests = HeadRequests(chat_model(), [tmp_path / "a.txt"], None, False, 0.0, 0)
    wave = requests.list_wave(0)
    assert wave
    assert all(request.settings is None for request in wave)
    assert not requests.list_wave(1000)
    task = small_task()
    (tmp_path / "b.txt").write_text(f"{task.holdout[0].text} " * 400)
    with pytest.raises(ModuleError, match="hold-out prompt"):
        HeadRequests(chat_model(), [tmp_path / "b.txt"], task, False, 0.0, 0)


def test_a_model_without_a_template_begins_from_nothing() -> None:
    requests = HeadRequests(small_model(), [], None, False, 0.0, 0)
    wave = requests.list_wave(0)
    assert [request.tokens for request in wave] == [(0,)] * WAVE
    assert len({request.settings for request in wave}) == WAVE, "each has a seed of its own"
    short = [replace(r, settings=replace(r.settings, max_new_tokens=12)) for r in wave[:16]]
    texts = list(head_text._answer(small_model(), short))
    assert len({tuple(text.tokens) for text in texts}) > 8
    assert {text.n_prompt for text in texts} == {1}


def test_answers_that_a_search_stored_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"prompt": f"def f{i}(x):"}) for i in range(6)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    model = load_adapter("demo", device="cpu", engine="hf")
    task = load_task(tmp_path / "log.jsonl")
    workload = make_workload(model, task, task.calibration)
    settings = TextSettings(workload.max_new_tokens, workload.end_on_repeat, workload.sampling)
    store = TextStore.open_for(model, settings)
    assert store is not None
    answer = list(range(5, 15))
    store.add(workload.prompt_ids, [answer] * len(workload.prompt_ids), 0, 1.0)
    monkeypatch.setattr(reference_text, "generate_continuations", lambda *_: pytest.fail("written"))
    requests = HeadRequests(model, [tmp_path / "log.jsonl"], None, False, 0.0, 0)
    texts = list(head_text._answer(model, requests.list_wave(0)))
    assert len(texts) == len(workload.prompt_ids)
    assert all(text.tokens[text.n_prompt :] == answer for text in texts)
    assert {text.states for text in texts} == {None}, "a pass computes them"


def test_prompts_of_one_pass_have_similar_lengths() -> None:
    one, other = (TextSettings(n, None) for n in (8, 9))
    pairs = [(one, range(n)) for n in (300, 10, 50, 590, 53, 280)] + [(other, range(50))]
    groups = head_text._group_by_length(pairs)
    assert [[len(p) for p in prompts] for _, prompts in groups] == [
        [10, 50],
        [53],
        [280, 300, 590],
        [50],
    ]
    many = head_text._group_by_length([(one, range(20))] * 20)
    assert [len(prompts) for _, prompts in many] == [16, 4], "a budget ends between two groups"


def test_every_other_request_of_the_model_begins_as_a_prompt_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"prompt": f"Please do number{i} now, and more"}) for i in range(40)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    model = chat_model()
    end, asked = model.spec.eos_token_ids[0], list[str]()

    def write(model: Any, prompts: Any, *_: Any, **__: Any) -> list[Continuation]:
        asked.extend(decode(model, tuple(prompt)) for prompt in prompts)
        return [Continuation([*encode_text(model.tokenizer, " the end", False), end])] * len(
            prompts
        )

    monkeypatch.setattr(head_text, "write_reference_text", write)
    requests = HeadRequests(model, [tmp_path / "log.jsonl"], None, False, 0.0, 0)
    written = [decode(model, r.tokens) for r in requests._write_requests(0, 200)]
    assert len(asked) == len(written) == 200
    assert set(asked[::2]) == {"<|user|>"}
    assert set(written[::2]) == {"<|user|>the end<|end|><|assistant|>"}
    assert all(text.startswith("<|user|>") and len(text) > 8 for text in asked[1::2])
    own = [text for text in asked[1::2] if text.startswith("<|user|>Please do number")]
    assert 1 < len(set(own)) < 40, "three words of the user's prompts that are not held out"
    [first] = {text for text in written if text.startswith(f"{own[0]} the")}
    assert first == f"{own[0]} the end<|end|><|assistant|>"


def test_a_model_that_writes_nothing_new_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    monkeypatch.setattr(head_text, "_answer", lambda *_: [AnsweredText([1, 2, 3, 4, 5], 1)])
    requests = HeadRequests(model, [], None, False, 0.0, 0)
    file = FeatureFile(tmp_path, {}, model.spec.hidden_size, 2)
    limits = TextLimits(None, 1.0, 4000)
    with pytest.raises(ModuleError, match="there are 1 texts"):
        head_text.collect_text(model, requests, file, 2, limits, "none", lambda event: None)


def decode(model: Any, tokens: tuple[int, ...]) -> str:
    return str(model.tokenizer.decode(list(tokens)))


# --- how much, and where it is stored


class FakeFile:
    n_tokens, seconds = 1000, 50.0


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (TextLimits(None, 1.0, 4000), 0.25),
        # Three readings of 1,000 tokens at 20 a second take 150 s, and 150 s are left.
        (TextLimits(200.0, 20.0, 10_000), 1.0),
        (TextLimits(200.0, 40.0, 10_000), 0.5),
        # Text that takes most of the time ends although training could read more.
        (TextLimits(80.0, 1e6, 10_000), 50 / 48),
        (TextLimits(40.0, 1e6, 10_000), 50 / 24),
    ],
)
def test_there_is_text_enough_if_training_reads_it_three_times_in_the_time_left(
    limits: TextLimits, share: float
) -> None:
    assert limits.share_done(FakeFile()) == pytest.approx(share, rel=1e-3)  # type: ignore[arg-type]


def file_here(folder: Path, n_texts: int = 3, facts: int = 0) -> FeatureFile:
    file = FeatureFile(folder, {"facts": facts}, 4, 2)
    for n in range(len(file.texts), n_texts):
        tokens = list(range(10 * n, 10 * n + 5 + n))
        values = torch.full((len(tokens), 4), float(n))
        probs = torch.full((len(tokens), 2), 0.5)
        targets = TeacherTargets(torch.full((len(tokens), 2), n), probs)
        file.add(StoredText(tokens, 2, 1.0, 0), Features(values, -values, targets))
    return file


def test_a_window_holds_whole_texts_and_says_which(tmp_path: Path) -> None:
    file = file_here(tmp_path)
    windows = file.pack_windows([0, 1, 2], 12)
    assert windows.shape == (2, 12)
    known = file.list_rows(windows[0])
    assert known.text_numbers.tolist() == [2] * 7 + [0] * 5
    assert known.tokens.tolist() == [*range(20, 27), *range(5)]
    assert known.starts_round.tolist() == [False, *[True] * 6, False, *[True] * 4]
    assert file.read(windows[0]).hidden[:, 0].tolist() == [2.0] * 7 + [0.0] * 5
    assert windows[1, 6:].tolist() == [NO_ROW] * 6
    known = file.list_rows(windows[1])
    assert known.text_numbers.tolist() == [1] * 6 + [NO_TEXT] * 6
    assert not known.starts_round[6:].any()
    [cut] = file.pack_windows([2], 3).tolist()
    assert file.list_rows(torch.tensor(cut)).tokens.tolist() == [24, 25, 26], "its end"


def test_a_file_that_was_cut_short_keeps_its_whole_texts(tmp_path: Path) -> None:
    file = file_here(tmp_path)
    index = tmp_path / "features.jsonl"
    index.write_text(index.read_text()[:-9])
    again = file_here(tmp_path, 0)
    assert again.texts == file.texts[:2]
    assert file_here(tmp_path).read(torch.arange(18)).hidden.unique().tolist() == [0, 1, 2]
    with pytest.raises(ModuleError, match="belongs to another training"):
        file_here(tmp_path, facts=1)
    (tmp_path / "features.bin").write_bytes(b"")
    with pytest.raises(ModuleError, match="damaged"):
        file_here(tmp_path)


def test_values_take_16_bits(tmp_path: Path) -> None:
    file = file_here(tmp_path)
    assert file.read(torch.arange(3)).hidden.dtype == torch.bfloat16
    per_token = (tmp_path / "features.bin").stat().st_size / file.n_tokens
    assert per_token == 2 * 2 * 4 + 2 * (4 + 2)


def test_seeds_give_other_texts() -> None:
    model = small_model()
    first, second = (HeadRequests(model, [], None, False, 0.0, seed) for seed in (0, 1))
    assert first.sha256 != second.sha256
    assert replace(first.list_wave(0)[0].settings, seed=0) == replace(  # type: ignore[type-var]
        second.list_wave(0)[0].settings, seed=0
    )
