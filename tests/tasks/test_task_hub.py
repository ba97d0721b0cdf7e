"""The Hub path against a small server that answers like the Hub: downloads, the cache, and each way
it can fail.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from skipsearch.errors import TaskError
from skipsearch.tasks import load_task, manifest_path, task_names
from skipsearch.tasks.manifest import HubSource, read_manifest
from skipsearch.tasks.sources import hub_dataset

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Folder = Callable[..., Path]


class FakeHub:
    """Files by name, of the one data set org/set at one commit; `refuse` is what it answers
    instead, as the Hub words it.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.refuse: tuple[int, str] | None = None
        self.requests = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                outer.requests += 1
                body = outer.files.get(
                    self.path.partition(f"/datasets/org/set/resolve/{COMMIT}/")[2]
                )
                status, code = outer.refuse or (
                    (200, "") if body is not None else (404, "EntryNotFound")
                )
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hash(body)}"')
                self.send_header("Content-Length", str(len(body or b"") if status == 200 else 0))
                self.end_headers()
                if self.command == "GET" and status == 200:
                    self.wfile.write(body or b"")

            do_GET = do_HEAD

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub_server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub_server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    yield hub_server
    hub_server.server.shutdown()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(sink)
    return sink.getvalue()


def source(**more: object) -> str:
    return json.dumps(
        {
            "kind": "hub",
            "repo": "org/set",
            "revision": COMMIT,
            "calibration_files": ["train.parquet"],
        }
        | more
    )


def refusal(folder: Path) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_files_of_a_pinned_revision_are_two_halves(
    fake_hub: FakeHub, task_folder: Folder
) -> None:
    fake_hub.files = {
        "train.parquet": parquet(
            [{"question": f"train {i}"} for i in range(9)] + [{"question": "shared"}]
        ),
        "test.jsonl": b'{"question": "test 0"}\n{"question": "test 1"}\n{"question": "shared"}\n',
    }
    folder = task_folder(source=source(holdout_files=["test.jsonl"]), holdout="9")
    task = load_task(folder)
    assert len(task.calibration) == 4
    assert all(
        prompt.text.startswith("Q: train ") and prompt.id.startswith("train-")
        for prompt in task.calibration
    )
    assert sorted(prompt.text for prompt in task.holdout) == [
        "Q: shared\nA:",
        "Q: test 0\nA:",
        "Q: test 1\nA:",
    ]
    before = fake_hub.requests
    assert load_task(folder) == task
    assert fake_hub.requests == before, "a pinned file that is there needs no network"


def test_one_file_is_cut_in_two_with_shots_from_neither_half(
    fake_hub: FakeHub, task_folder: Folder
) -> None:
    fake_hub.files = {
        "train.parquet": parquet(
            [{"question": f"q{i}", "answer": f"line\nof {i}"} for i in range(8)]
        )
    }
    task = load_task(
        task_folder(
            'shots: 2\nshot: "Q: {question} A: {answer}\\n"\nsingle_line: [answer]\n',
            source=source(),
        )
    )
    texts = [prompt.text for prompt in task.calibration + task.holdout]
    shots = {text.rpartition("Q: ")[0] for text in texts}
    assert len(texts) == 6
    assert len(shots) == 1
    assert min(shots).count(" A: line of ") == 2
    asked = {text.rpartition("Q: ")[2].removesuffix("\nA:") for text in texts}
    assert len(asked) == 6
    assert not any(f"Q: {question} A:" in min(shots) for question in asked)


def test_large_files_are_sampled_by_the_seed(
    fake_hub: FakeHub, task_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_dataset, "MAX_POOL_ROWS", 5)
    fake_hub.files = {"train.parquet": parquet([{"question": f"q{i}"} for i in range(50)])}
    tasks = [load_task(task_folder(source=source(), seed=seed)) for seed in ("0", "0", "1")]
    ids = [{prompt.id for prompt in task.calibration + task.holdout} for task in tasks]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 5


@pytest.mark.parametrize(
    ("refuse", "rule"),
    [
        ((403, "GatedRepo"), "org/set is gated; accept its terms"),
        ((401, "RepoNotFound"), "org/set is not a data set on the Hub, or a private one"),
        ((404, "RevisionNotFound"), f"org/set has no revision {COMMIT}"),
        (None, f"org/set has no file train.parquet at revision {COMMIT}"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    fake_hub: FakeHub, task_folder: Folder, refuse: tuple[int, str] | None, rule: str
) -> None:
    fake_hub.refuse = refuse
    assert rule in refusal(task_folder(source=source()))


def test_offline_without_a_cached_copy_is_one_sentence(
    fake_hub: FakeHub, task_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not in the local cache and the Hub cannot be reached" in refusal(
        task_folder(source=source())
    )


def test_a_damaged_file_is_named(fake_hub: FakeHub, task_folder: Folder) -> None:
    fake_hub.files = {"train.parquet": b"PAR1 this is no parquet file"}
    assert "org/set/train.parquet is not readable as parquet" in refusal(
        task_folder(source=source())
    )


def test_a_wrong_column_names_the_row(fake_hub: FakeHub, task_folder: Folder) -> None:
    fake_hub.files = {"train.parquet": parquet([{"text": "a"}, {"text": "b"}])}
    assert "org/set/train.parquet, row " in (message := refusal(task_folder(source=source())))
    assert "there is no column 'question', which task small needs; its columns are text" in message


SHAPES: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "cnndm": (
        lambda i: {"article": f"News {i}.", "highlights": "One .\nTwo .", "id": i},
        "Summary: One . Two .\nArticle: News",
    ),
    "xsum": (
        lambda i: {"document": f"News {i}.", "summary": "One.", "id": i},
        "Summary: One.\nArticle: News",
    ),
    "humaneval": (
        lambda i: {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def f{i}():\n",
            "canonical_solution": "",
        },
        "def f",
    ),
    "gsm8k": (lambda i: {"question": f"How many {i}?", "answer": "#### 3"}, "Question: How many"),
    "mtbench": (
        lambda i: {
            "prompt": [f"first {i}", "second"],
            "prompt_id": 7,
            "category": "math",
            "reference": [],
        },
        "first",
    ),
    "wmt14_de_en": (
        lambda i: {"translation": {"de": f"Satz {i}", "en": "sentence"}},
        "Translate German to English: Satz",
    ),
    "nq": (lambda i: {"question": f"who was {i}", "answer": ["somebody"]}, "who was"),
    "rag": (lambda i: {"prompt": f"Passage.\nWho was {i}?"}, "Passage.\nWho was"),
    "specbench": (lambda i: {"prompt": f"Question {i}?"}, "Question"),
}


@pytest.mark.parametrize("task", sorted(set(task_names()) - {"chat", "extract", "pycode", "prose"}))
def test_every_hub_task_of_ours_renders_rows_of_its_data_sets_shape(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with the columns that the data set's card names; the real ones are out of reach of a
    test.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setattr(hub_dataset, "download_file", lambda source, file, task: tmp_path / file)
    origin = read_manifest(manifest_path(task)).source
    assert isinstance(origin, HubSource)
    shape, expected = SHAPES[task]
    for file in (*origin.calibration_files, *(origin.holdout_files or ())):
        rows = [shape(f"{file}-{i}") for i in range(100)]
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / file).write_bytes(parquet(rows) if file.endswith(".parquet") else lines)
    loaded = load_task(task)
    assert all(expected in prompt.text for prompt in loaded.calibration + loaded.holdout)
    assert {p.text for p in loaded.calibration}.isdisjoint(p.text for p in loaded.holdout)
    assert loaded.notes == ()
