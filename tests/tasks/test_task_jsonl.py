from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from skipsearch.core.schema_types import Name
from skipsearch.errors import TaskError
from skipsearch.replay.workload import encode_task_prompt, render_prompt
from skipsearch.tasks import Prompt, load_task, read_prompts
from skipsearch.tasks.load import task_name
from skipsearch.tasks.manifest import read_manifest
from skipsearch.tasks.split import pair_pools, split_pool

Write = Callable[..., Path]
DATA = (
    Path(__file__).parents[3] / "shared" / "data"
)  # samples of the published files, where a developer has them


def prompts(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"prompt number {i}"} for i in range(n)]


def refusal(path: Path) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_of_prompts_is_a_task_with_plain_defaults(jsonl: Write) -> None:
    task = load_task(jsonl(prompts(200)))
    assert (task.name, task.max_new_tokens, task.end_on_repeat, task.sampling.temperature) == (
        "rows",
        256,
        "loop",
        0.0,
    )
    assert (len(task.calibration), len(task.holdout), task.notes) == (96, 32, ())


def test_a_small_file_is_cut_in_two_and_says_so(jsonl: Write) -> None:
    task = load_task(jsonl(prompts(20)))
    assert (len(task.calibration), len(task.holdout)) == (10, 10)
    assert task.notes == (
        "the task has only 10 calibration prompts, instead of 96",
        "the task has only 10 hold-out prompts, instead of 32",
    )


def test_the_order_of_a_file_and_repeated_lines_do_not_matter(jsonl: Write) -> None:
    rows = prompts(30)
    once, again = load_task(jsonl(rows)), load_task(jsonl([*reversed(rows), *rows], "again.jsonl"))
    assert once.calibration_sha256 == again.calibration_sha256
    assert once.holdout_sha256 == again.holdout_sha256 != once.calibration_sha256


def test_fewer_than_two_distinct_prompts_are_refused(jsonl: Write) -> None:
    assert "1 distinct prompt; at least 2 are needed" in refusal(
        jsonl([{"prompt": "a"}, {"prompt": "a "}])
    )
    assert "holds no line" in refusal(jsonl([]))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b'{"prompt": "x"', r"line 3: not JSON (Expecting ',' delimiter, column 15)"),
        (b"[1]", "line 3: a list, not an object"),
        (b"null", "line 3: a NoneType, not an object"),
        (b'{"prompt": "caf\xe9"}', "line 3: not UTF-8 (byte 15 of the line)"),
        (b'{"prompt": ""}', "line 3: the prompt is empty"),
        (b'{"prompt": null}', "line 3: prompt is missing"),
        (b'{"prompt": ["a"]}', "line 3: prompt is a list"),
        (b'{"prompt": "\\ud800"}', "line 3: the text holds half of a surrogate pair"),
        (b'{"body": "x"}', "line 3: its columns (body) are of no known shape"),
        (b'{"messages": []}', "line 3: its conversation has no turn of a user"),
        (b'{"messages": [{"role": "user"}]}', "line 3: a turn of its conversation is"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content is text"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "tools": "x"}',
            "line 3: tools is 'x'; it is a list",
        ),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [1]}]}',
            "line 3: a call of a tool is '1'",
        ),
        (b"{}", "line 3: its columns (none) are of no known shape"),
        (b"1" * 5000, "line 3: not JSON (Exceeds the limit"),
        (b"[" * 100_000, "line 3: nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, rule: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    assert rule in refusal(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path / "none.jsonl")
        == f"{tmp_path / 'none.jsonl'}: cannot be read (No such file or directory)"
    )


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir],
    ids=["pipe", "device", "folder"],
)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "endless.jsonl"
    make(path)
    assert re.search(
        r"endless\.jsonl: this is a (device or pipe|folder); give a regular file", refusal(path)
    )
    with pytest.raises(TaskError, match="give a regular file"):
        read_prompts(path)
    with pytest.raises(TaskError, match="give a regular file"):
        load_task("pycode", data=path)
    with pytest.raises(TaskError, match="give a regular file"):
        read_manifest(path)


def test_a_link_to_a_file_is_as_good_as_the_file(jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(jsonl(prompts(4)))
    assert len(read_prompts(tmp_path / "link.jsonl")) == 4


def test_read_prompts_keeps_order_repetitions_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '\ufeff{"prompt": "a"}\n\n{"id": "x", "prompt": "b"}\r\n{"id": "x", "prompt": "a"}', "utf-8"
    )
    assert read_prompts(path) == (Prompt("line-1", "a"), Prompt("x", "b"), Prompt("x@line-4", "a"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
            Prompt("81", "first", "writing"),
        ),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "…"},
            Prompt("HumanEval/0", "def f():\n"),
        ),
        (
            {"question": "How many?", "answer": "#### 3"},
            Prompt("line-1", "Question: How many?\nAnswer:"),
        ),
        (
            {"article": "News.", "highlights": "Short."},
            Prompt("line-1", "Article: News.\nSummary:"),
        ),
    ],
)
def test_published_files_are_understood_as_they_are(
    jsonl: Write, row: dict[str, object], expected: Prompt
) -> None:
    assert read_prompts(jsonl([row])) == (expected,)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("row", "request_text", "columns"),
    [
        (
            {"messages": CONVERSATION},
            "system: Be brief.\n\nuser: Hi\n\nassistant: Hello\n\nuser: Bye",
            "messages, without a final answer",
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
            "Hi",
            "conversations, without a final answer",
        ),
        ({"instruction": "Translate.", "input": "Hi", "output": "Salut"}, None, None),
        ({"instruction": "Sing.", "input": "", "output": "La"}, "Sing.", "instruction"),
        ({"problem": "1 + 1", "solution": "2"}, "1 + 1", "problem"),
        ({"question": "How many?"}, "How many?", "question"),
        ({"text": "Once upon"}, "Once upon", "text"),
    ],
)
def test_rows_of_common_data_sets_are_requests_and_the_task_says_what_was_read(
    jsonl: Write, row: dict[str, object], request_text: str | None, columns: str | None
) -> None:
    task = load_task(jsonl([row, {"prompt": "another"}]), chat=True)
    texts = {prompt.text for prompt in (*task.calibration, *task.holdout)}
    assert texts == {request_text or "Translate.\n\nHi", "another"}
    assert f"prompts are read from {columns or 'instruction, input'}" in task.notes


def test_a_conversation_goes_into_the_template_with_its_system_prompt_and_tools(
    jsonl: Write,
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    parts = [{"type": "text", "text": "By"}, {"type": "text", "text": "e"}]
    rows: list[dict[str, object]] = [
        {"messages": [*CONVERSATION[:3], {"role": "user", "content": parts}, *answers]},
        {
            "messages": [*CONVERSATION, *answers, {"role": "tool", "content": "2"}],
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    ]
    task = load_task(jsonl(rows))
    assert task.chat, "--chat need not be given"
    plain, with_tools = sorted((*task.calibration, *task.holdout), key=lambda p: len(p.turns))
    assert plain.turns == CONVERSATION, "the last answer is what the model writes"
    assert with_tools.turns[-2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert with_tools.tools == rows[1]["tools"]
    tokenizer = letter_tokenizer(CHAT_TEMPLATE)
    rendered = "<s>system:Be brief.\nuser:Hi\nassistant:Hello\nuser:Bye\nai:"
    assert render_prompt(task, tokenizer, plain) == rendered
    assert tokenizer.decode(encode_task_prompt(task, tokenizer, plain, 4)) == "\nai:"


def test_a_single_request_of_a_conversation_is_a_prompt_like_others(jsonl: Write) -> None:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("Hi", "Bye")]
    prompts = [{"prompt": "Hi"}, {"prompt": "Bye"}]
    assert load_task(jsonl(rows)).calibration == load_task(jsonl(prompts), chat=True).calibration


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"turns": ["Hi", "Bye"]},
    ],
)
def test_a_file_for_a_task_may_have_prompts_or_conversations_of_its_own(
    jsonl: Write, row: dict[str, object]
) -> None:
    task = load_task("chat", data=jsonl([row, {"prompt": "Bye"}]))
    assert {prompt.text for prompt in (*task.calibration, *task.holdout)} == {"Hi", "Bye"}


def conversation(name: str, n_requests: int) -> list[dict[str, str]]:
    """The requests of an agent: each begins with the one before."""
    start = f"system: {name} " + "Mend the code. " * 10
    return [{"prompt": start + "user: Go on. " * n} for n in range(1, n_requests + 1)]


def test_requests_of_one_conversation_are_not_searched_and_measured_on_both(jsonl: Write) -> None:
    rows = [row for name in "abcdefgh" for row in conversation(name, 5)]
    task = load_task(jsonl(rows))
    names = [{p.text.split()[1] for p in half} for half in (task.calibration, task.holdout)]
    assert names[0] | names[1] == {*"abcdefgh"}
    assert not names[0] & names[1]
    assert len(task.holdout) == 20
    alone = load_task(jsonl(conversation("a", 6)))
    assert len(alone.calibration) == len(alone.holdout) == 3, "there is no other text"


def test_a_first_request_without_a_system_prompt_belongs_to_its_conversation(jsonl: Write) -> None:
    rows = []
    for name in "abcdefgh":
        first = {"role": "user", "content": f"{name} " + "Mend the code. " * 10}
        answer = {"role": "assistant", "content": "Done."}
        second = {"role": "user", "content": "Go on."}
        rows += [{"messages": [first]}, {"messages": [first, answer, second]}]
    task = load_task(jsonl(rows))
    names = [
        {p.text.removeprefix("user: ")[0] for p in half}
        for half in (task.calibration, task.holdout)
    ]
    assert names[0] | names[1] == {*"abcdefgh"}
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my chats (1).jsonl", "my-chats-1"),
        ("2026-01-01T12:00.jsonl", "2026-01-01T12-00"),
        ("_prompts.jsonl", "prompts"),
        ("prompts_.jsonl", "prompts_"),
        ("\u5bf9\u8bdd.jsonl", "unknown"),
    ],
)
def test_a_file_of_any_name_is_a_task_whose_name_a_profile_can_hold(
    file: str, name: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / file, [{"prompt": f"number {i}"} for i in range(4)])
    assert load_task(path).name == task_name(path) == name
    assert TypeAdapter(Name).validate_python(name) == name


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows in the format that the ending of a path names."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(f'"{v}"' for v in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_other_files_of_the_same_rows_are_the_same_task(
    suffix: str, jsonl: Write, tmp_path: Path
) -> None:
    rows = [{"prompt": f"number {i},\nin two lines"} for i in range(4)]
    task = load_task(write_rows(tmp_path / f"rows{suffix}", rows))
    assert task.name == "rows"
    assert task.calibration_sha256 == load_task(jsonl(rows)).calibration_sha256


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("x.json", b'{"prompt": "a"}', "is no list of objects"),
        ("x.json", b"[1", "not JSON"),
        ("x.json", b"[]", "holds no row"),
        ("x.json", b"[" * 100_000, "not JSON"),
        ("x.json", b'["\xff"]', "not UTF-8"),
        ("x.csv", b'prompt\n"a" b', "not CSV"),
        ("x.csv", b"prompt\n", "holds no row"),
        ("x.csv", b"name\nx\n", "row 1: its columns \\(name\\) are of no known shape"),
        ("x.parquet", b"PAR1", "not readable as parquet"),
        ("x.parquet", b"", "not readable as parquet"),
    ],
)
def test_a_damaged_file_is_one_sentence(
    name: str, content: bytes, rule: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(rule, refusal(tmp_path / name))


def test_with_a_chat_template_published_lines_are_requests(jsonl: Write) -> None:
    path = jsonl(
        [
            {"question": "How many?", "answer": "#### 3"},
            {"article": "News.", "highlights": "Short."},
            {"prompt": "Say it."},
        ]
    )
    task = load_task(path, chat=True)
    texts = {prompt.text for prompt in (*task.calibration, *task.holdout)}
    assert texts == {"How many?", "Summarize:\nNews.", "Say it."}


def test_a_tasks_prompt_ends_on_text_where_a_request_to_decode_stays_as_it_is(jsonl: Write) -> None:
    path = jsonl([{"prompt": f"def f{i}():\r\n\n"} for i in range(2)])
    task = load_task(path)
    assert sorted(prompt.text for prompt in task.calibration + task.holdout) == [
        "def f0():",
        "def f1():",
    ]
    assert [prompt.text for prompt in read_prompts(path)] == ["def f0():\r\n\n", "def f1():\r\n\n"]
    humaneval = load_task("humaneval", data=path)
    assert {prompt.text for prompt in humaneval.calibration + humaneval.holdout} == {
        "def f0():",
        "def f1():",
    }


@pytest.mark.skipif(
    not DATA.is_dir(), reason="no samples of the published files beside the repository"
)
@pytest.mark.parametrize("file", ["spec_bench_even", "humaneval", "gsm8k_train200"])
def test_real_files_load(file: str) -> None:
    lines = (DATA / f"{file}.jsonl").read_text("utf-8").splitlines()
    task = load_task(DATA / f"{file}.jsonl")
    assert (len(task.calibration), len(task.holdout)) == (96, 32)
    first = json.loads(lines[0])
    assert len(read_prompts(DATA / f"{file}.jsonl")) == len(lines)
    assert read_prompts(DATA / f"{file}.jsonl")[0].id == str(
        first.get("question_id", first.get("task_id", "line-1"))
    )


texts = st.lists(st.text("abc ", min_size=1, max_size=3).filter(str.strip), min_size=0, max_size=30)


@given(texts, st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
def test_halves_are_disjoint_never_empty_and_waste_nothing(
    pool: list[str], calibration: int, holdout: int, seed: int
) -> None:
    distinct = {text.strip() for text in pool}
    made = [Prompt(str(i), text) for i, text in enumerate(pool)]
    if len(distinct) < 2:
        with pytest.raises(TaskError, match="at least 2"):
            split_pool(made, calibration, holdout, seed, "here")
        return
    front, back = split_pool(made, calibration, holdout, seed, "here")
    found = [{p.text.strip() for p in half} for half in (front, back)]
    assert found[0].isdisjoint(found[1])
    assert 1 <= len(front) == len(found[0]) <= calibration
    assert 1 <= len(back) == len(found[1]) <= holdout
    assert len(front) + len(back) == min(len(distinct), calibration + holdout)


@given(
    texts.filter(lambda pool: len({text.strip() for text in pool}) >= 8),
    st.text("xyz", min_size=1, max_size=2),
)
def test_a_file_that_grows_moves_no_prompt_to_the_other_half(pool: list[str], added: str) -> None:
    made = [Prompt(str(i), text) for i, text in enumerate(pool)]
    front, back = split_pool(made, 4, 4, 0, "here")
    more_front, more_back = split_pool([*made, Prompt("new", added)], 4, 4, 0, "here")
    assert {p.id for p in front}.isdisjoint(p.id for p in more_back)
    assert {p.id for p in back}.isdisjoint(p.id for p in more_front)


def test_a_text_of_both_pools_is_held_out_alone() -> None:
    front, back = pair_pools(
        [Prompt("a", "one"), Prompt("b", "two")], [Prompt("c", "two ")], 5, 5, 0, "here"
    )
    assert ([p.id for p in front], [p.id for p in back]) == (["a"], ["c"])
    with pytest.raises(TaskError, match="no prompt for the calibration split"):
        pair_pools([Prompt("b", "two")], [Prompt("c", "two")], 5, 5, 0, "here")


def test_a_prompt_that_a_server_kept_keeps_the_line_break_of_its_template(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "a\\n"}\n{"prompt": "b\\n", "as_served": true}\n')
    task = load_task(path)
    assert {prompt.text for prompt in (*task.calibration, *task.holdout)} == {"a", "b\n"}
