"""The driver of a training: which text it takes, which it never takes, what it writes, and the
command.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import cmd, run_in_process
from helpers.threads import one_thread
from helpers.tiny import VOCAB
from models.every_class import build
from tuning.small_search import small_model, small_task

from skipsearch.cli import train_run
from skipsearch.cli.train_view import TrainView
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.trained.module_files import (
    hash_module_file,
    make_reference,
    read_module_header,
)
from skipsearch.drafters.trained.module_weights import apply_module, load_module, save_module
from skipsearch.errors import ModuleError
from skipsearch.models import adapt
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.tasks import Prompt
from skipsearch.training import corpus, driver
from skipsearch.training.corpus import generate_corpus, read_corpus, read_documents, token_windows
from skipsearch.training.distill_batch import make_draft_batch, run_teacher
from skipsearch.training.driver import (
    Corpus,
    TrainingPlan,
    parse_memory_limit,
    plan_adapted,
    plan_kangaroo,
    plan_mtp,
    plan_s3d,
    train,
)
from skipsearch.training.mask_selection import agreement_under
from skipsearch.training.trainer import TrainSettings
from skipsearch.tuning.events import Notice

__all__ = ["one_thread"]

QUICK = TrainSettings(steps=4, seconds=None, batch_size=2)
MASK = SkipMask(5, (1, 3), (0, 2))


def test_a_model_without_a_row_is_not_sent_to_another_engine() -> None:
    with pytest.raises(ModuleError, match="is read from itself: tune a mask for it instead"):
        plan_kangaroo(adapt(build("arcee")), 1)


class Ids:
    """What a tokenizer returns."""

    def __init__(self, text: str):
        self.input_ids = [ord(c) % VOCAB for c in text]


class Letters:
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Ids:
        return Ids(text)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(t + 32) for t in tokens)


def text_here(count: int = 40) -> Corpus:
    rows = torch.randint(
        VOCAB, (count, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    return Corpus(rows[8:], rows[:8], "random letters", "none")


def lettered() -> HFAdapter:
    model = small_model(fuse=False)
    assert isinstance(model, HFAdapter)
    model.tokenizer = Letters()
    return model


# --- text


def test_text_comes_from_files_and_folders_and_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"prompt": "three"}\n')
    (tmp_path / "c.bin").write_bytes(b"\x00")
    assert list(read_documents(tmp_path)) == ["one", "two", "three"]
    assert list(read_documents(tmp_path / "a.txt")) == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.jsonl", b'{"text": "two"}\n{"nothing": 1}\n', "x.jsonl:2: a line is a JSON object"),
        ("x.txt", b"\xff\xfe\x00", "UTF-8"),
        ("x.bin", b"", "holds no text"),
        (None, b"", "no such file or folder"),
    ],
)
def test_what_is_no_text_is_one_sentence(
    tmp_path: Path, name: str | None, content: bytes, reason: str
) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModuleError, match=reason):
        list(read_documents(tmp_path if name else tmp_path / "none"))


def test_texts_are_cut_into_windows_with_the_end_of_a_text_between_them() -> None:
    found = token_windows(Letters(), ["abc", "de"], 3, (0,))
    assert found.tolist() == [[97 % VOCAB, 98 % VOCAB, 99 % VOCAB], [0, 100 % VOCAB, 101 % VOCAB]]
    with pytest.raises(ModuleError, match="fewer than one window of 9"):
        token_windows(Letters(), ["abc"], 9)
    with pytest.raises(ModuleError, match="no tokenizer"):
        token_windows(None, ["abc"], 2)


def test_the_model_writes_what_decoding_alone_writes() -> None:
    model = small_model(fuse=False)
    prompts = torch.tensor([[5, 17, 40], [3, 22, 5]], dtype=torch.int32)
    found = generate_corpus(model, prompts, 12, 0.0, 0)
    for prompt, row in zip(prompts.tolist(), found.tolist(), strict=True):
        assert row == [*prompt, *Decoder(model).generate(prompt, 9).tokens]
    assert torch.equal(
        generate_corpus(model, prompts, 12, 1.0, 3), generate_corpus(model, prompts, 12, 1.0, 3)
    )
    assert not torch.equal(
        generate_corpus(model, prompts, 12, 1.0, 3), generate_corpus(model, prompts, 12, 1.0, 4)
    )


def test_of_a_task_only_the_calibration_half_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WINDOW_TOKENS", 12)
    task = small_task(calibration=(Prompt("c", "aaaaaaaa"),), holdout=(Prompt("h", "zzzzzzzz"),))
    text = read_corpus(small_model(), [], task, False, 0, lambda event: None, n_tokens=120)
    every = torch.cat([text.windows, text.validation])
    assert bool((every[:, :6] == ord("a") % VOCAB).all())
    assert "calibration prompts of task words" in text.description


def test_text_that_holds_a_holdout_prompt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text, and then commit whatever " * 40)
    task = replace(small_task(), holdout=(Prompt("word/3", "commit"),))
    with pytest.raises(
        ModuleError, match="hold-out prompt word/3 of task words stands in this text"
    ):
        read_corpus(lettered(), [tmp_path / "a.txt"], task, False, 0, lambda event: None)


def test_some_text_is_kept_aside() -> None:
    text = read_corpus(small_model(), [], None, True, 0, lambda event: None, n_tokens=128 * 40)
    assert len(text.windows) == 38
    assert len(text.validation) == 2
    assert "continued by tiny itself" in text.description


# --- training


@pytest.mark.parametrize("rank", [None, 2])
def test_a_training_ends_in_a_module_that_drafts_and_says_how_it_came_to_be(
    tmp_path: Path, rank: int | None
) -> None:
    model = lettered()
    result = train(
        plan_adapted(model, text_here(), MASK, rank=rank, draft_tokens=3),
        text_here(),
        tmp_path,
        QUICK,
        "90%",
    )
    card = read_module_header(result.path).card
    assert card == result.card
    assert (card.mask, card.rank, card.trained.steps, card.trained.text) == (
        MASK,
        rank,
        4,
        "random letters",
    )
    assert [path.name for path in tmp_path.iterdir()] == [result.path.name], (
        "the checkpoint is gone"
    )
    spec = Adapted.from_module(MASK, 3, Fixed(), make_reference(result.path, result.path.name))
    found = Decoder(model, Recipe((spec,)), module_folders=[tmp_path]).generate([1, 2, 3], 16)
    assert found.tokens == Decoder(model).generate([1, 2, 3], 16).tokens
    assert found.stats.drafted


@pytest.mark.parametrize(("after", "n_notices"), [(0.4, 1), (0.5, 0), (0.6, 0)])
def test_a_training_that_made_a_draft_worse_says_so(
    after: float, n_notices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, said = iter((0.5, after)), list[object]()
    monkeypatch.setattr(driver, "measure_agreement", lambda *_: next(measured))
    text = text_here()
    train(plan_kangaroo(lettered(), 2), text, tmp_path, QUICK, "90%", said.append)
    notices = [e.sentence for e in said if isinstance(e, Notice)]
    assert sum("a longer --budget" in sentence for sentence in notices) == n_notices


def test_a_thin_mask_is_looked_for_where_none_is_given(tmp_path: Path) -> None:
    result = train(
        plan_adapted(lettered(), text_here(), draft_sublayers=3),
        text_here(),
        tmp_path,
        QUICK,
        "90%",
    )
    assert 2 * 5 - result.card.mask.n_skipped == 3
    with pytest.raises(ModuleError, match="--draft-sublayers 10 is no thin mask"):
        plan_adapted(lettered(), text_here(), draft_sublayers=10)


def test_a_training_goes_on_from_a_module_without_what_that_misses_least(tmp_path: Path) -> None:
    model, text = lettered(), text_here()
    first = train(
        plan_adapted(model, text, MASK, draft_tokens=3),
        text,
        tmp_path / "a",
        replace(QUICK, steps=20),
        "90%",
    )
    whole = plan_adapted(model, text, draft_tokens=3, init_from=first.path)
    card, tensors = load_module(first.path)
    assert all(
        torch.equal(parameter, tensors[name])
        for name, parameter in whole.student.parameters.items()
    )
    thinner = plan_adapted(model, text, draft_sublayers=4, draft_tokens=3, init_from=first.path)
    draft = apply_module(model, card, tensors, "x")
    given = [make_draft_batch(run_teacher(model, text.validation.long(), 1), 3, 0)]
    by_what_is_left = {
        s: agreement_under(draft, MASK.flip(s), given) for s in range(10) if s not in MASK.sublayers
    }
    mask = SkipMask(5, thinner.student.card["attn"], thinner.student.card["mlp"])
    dropped = mask.sublayers - MASK.sublayers
    assert len(by_what_is_left) == 6
    assert len(dropped) == 2
    assert max(by_what_is_left, key=lambda s: by_what_is_left[s]) in dropped
    assert {name.rsplit(".", 3)[0] for name in thinner.student.parameters} < {
        name.rsplit(".", 3)[0] for name in whole.student.parameters
    }
    assert all(
        torch.equal(parameter, tensors[name])
        for name, parameter in thinner.student.parameters.items()
    )
    assert whole.student.facts != plan_adapted(model, text, MASK, draft_tokens=3).student.facts, (
        "another training, for its checkpoint"
    )
    second = train(thinner, text, tmp_path / "b", QUICK, "90%")
    assert second.card.mask == mask
    assert second.card.trained.text == f"from {first.path.name} on: random letters"
    with pytest.raises(ModuleError, match="--draft-sublayers 7 is more than the 6 sub-layers"):
        plan_adapted(model, text, draft_sublayers=7, init_from=first.path)
    with pytest.raises(
        ModuleError, match="has whole copies, and goes on as that: leave --rank out"
    ):
        plan_adapted(model, text, rank=2, init_from=first.path)


STARTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # by kind: the options of the first training, others that do not fit, and the refusal
    "kangaroo": ({"exit_layer": 2, "form": "layer"}, {"exit_layer": 3}, "--exit-layer 3"),
    "s3d": ({"draft_layers": 3, "draft_tokens": 3, "rank": 2}, {"rank": 4}, "--rank 4"),
    "mtp": ({"vocabulary_size": 20}, {"vocabulary_size": 0}, "--vocabulary 0"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_every_draft_can_be_trained_on_from_its_module(kind: str, tmp_path: Path) -> None:
    model, text = lettered(), text_here()
    options, others, refusal = STARTS[kind]

    def plan(**options: Any) -> TrainingPlan:
        if kind == "mtp":
            return plan_mtp(model, text, **options)
        return {"kangaroo": plan_kangaroo, "s3d": plan_s3d}[kind](model, **options)

    first = train(plan(**options), text, tmp_path / "a", QUICK, "90%")
    assert first is not None
    _, tensors = load_module(first.path)
    student = plan(init_from=first.path).student
    assert student.parameters.keys() == tensors.keys()
    assert all(torch.equal(p, tensors[name]) for name, p in student.parameters.items())
    assert {k: v for k, v in student.card.items() if k != "vocabulary"} == {
        k: v for k, v in plan(**options).student.card.items() if k != "vocabulary"
    }
    assert student.facts["start"] == hash_module_file(first.path)
    second = train(plan(init_from=first.path), text, tmp_path / "b", QUICK, "90%")
    assert second is not None
    trained, earlier = second.card.trained, first.card.trained
    assert trained.text == f"from {first.path.name} on: random letters"
    assert (trained.steps, trained.rows) == (2 * earlier.steps, 2 * earlier.rows)
    assert trained.seconds >= earlier.seconds
    assert trained.before == earlier.after
    assert second.path.name == first.path.name
    wrong = f"{refusal} is not what .* leave {refusal.split()[0]} out"
    with pytest.raises(ModuleError, match=wrong):
        plan(init_from=first.path, **others)
    if kind != "kangaroo":
        with pytest.raises(ModuleError, match=f"of the kind {kind}, not kangaroo"):
            plan_kangaroo(model, init_from=first.path)


def test_a_module_of_another_shape_is_no_start(tmp_path: Path) -> None:
    model, text = lettered(), text_here()
    first = train(plan_kangaroo(model, 2), text, tmp_path, QUICK, "90%")
    assert first is not None
    card, tensors = load_module(first.path)
    name, tensor = next((k, v) for k, v in tensors.items() if v.dim() == 2)
    for changed in ({name: tensor[:1]}, {}):
        damaged = {k: v for k, v in tensors.items() if k != name} | changed
        save_module(first.path, card, damaged)
        with pytest.raises(ModuleError, match=rf"{re.escape(name)}.* leave --init-from out"):
            plan_kangaroo(model, init_from=first.path)
    s3d = train(plan_s3d(model, 3, rank=2), text, tmp_path, QUICK, "90%")
    assert s3d is not None
    card, tensors = load_module(s3d.path)
    save_module(s3d.path, card, {k: v for k, v in tensors.items() if ":" in k})
    with pytest.raises(ModuleError, match=r"has no .*: train a new one"):
        plan_s3d(model, init_from=s3d.path)


def test_memory_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ModuleError, match="more than --extra-memory 10%"):
        train(plan_adapted(lettered(), text_here(), MASK), text_here(), tmp_path, QUICK, "10%")
    assert [parse_memory_limit(said, 1000) for said in ("10%", "2MB", "1.5GB", "1 MiB")] == [
        100,
        2_000_000,
        1_500_000_000,
        2**20,
    ]
    with pytest.raises(ModuleError, match="no amount of memory"):
        parse_memory_limit("lots", 1000)


# --- the command


def test_the_command_trains_prints_alpha_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(
        "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 200
    )
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "train adapted --model demo --data {} --out {} --draft-sublayers 1 --steps 2 "
            "--batch-size 2 --threads 1 --json",
            tmp_path / "text.txt",
            tmp_path / "m",
        ),
    )
    assert code == 0, shown
    answer = json.loads(printed)
    assert Path(answer["file"]).is_file()
    assert 0 <= answer["alpha"]["before"] <= 1
    assert answer["card"]["trained"]["steps"] == 2
    assert answer["next"] == f"skipsearch tune --model demo --task TASK --modules {tmp_path / 'm'}"
    assert "step 2: loss" in shown


@pytest.mark.parametrize(
    ("command", "options", "planned"),
    [
        ("adapted", (), (None, None, None, 5, 0, None)),
        (
            "adapted",
            ("--draft-sublayers", 4, "--rank", 8, "--draft-tokens", 3, "--seed", 7),
            (None, 4, 8, 3, 7, None),
        ),
        ("adapted", ("--init-from", "x"), (None, None, None, 5, 0, Path("x"))),
        ("kangaroo", (), (None, None, None)),
        ("kangaroo", ("--exit-layer", 2, "--form", "layer"), (2, "layer", None)),
        ("kangaroo", ("--init-from", "x"), (None, None, Path("x"))),
        ("s3d", (), (None, None, None, 0, None)),
        (
            "s3d",
            ("--draft-sublayers", 6, "--draft-tokens", 3, "--rank", 8, "--seed", 7),
            (6, 3, 8, 7, None),
        ),
        ("s3d", ("--init-from", "x"), (None, None, None, 0, Path("x"))),
        ("mtp", (), (None, 3, None)),
        ("mtp", ("--vocabulary", 0, "--init-from", "x"), (0, 3, Path("x"))),
    ],
)
def test_each_command_makes_the_plan_that_its_options_describe(
    command: str,
    options: tuple[object, ...],
    planned: tuple[object, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text.txt").write_text("def read(path):\n    return path.read_text()\n" * 200)
    plans = []

    def plan(*arguments: object) -> None:
        plans.append(
            tuple(a for a in arguments if not isinstance(a, HFAdapter | Corpus | TrainView))
        )
        raise ModuleError("enough")

    monkeypatch.setattr(driver, f"plan_{command}", plan)
    monkeypatch.setattr(train_run, "_read_card", lambda path: None)
    where = ("--model", "demo", "--data", tmp_path / "text.txt", "--out", tmp_path / "m")
    code, _, shown = run_in_process(
        capsys, monkeypatch, "train", command, *where, "--threads", 1, *options
    )
    assert (code, plans) == (1, [planned]), shown


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("nonsense", "--self-generated"), 2, "No such command 'nonsense'"),
        (("adapted",), 2, "say what to train on"),
        (("kangaroo",), 2, "say what to train on"),
        (("s3d",), 2, "say what to train on"),
        (
            ("adapted", "--self-generated", "--draft-sublayers", "3", "--profile", "x.yaml"),
            2,
            "give one of them",
        ),
        (("adapted", "--self-generated", "--learning-rate", "7"), 2, "no learning rate"),
        (("kangaroo", "--self-generated", "--init-from", "/nowhere"), 1, "/nowhere"),
        (("kangaroo", "--self-generated", "--form", "round"), 2, "is attention or layer"),
        (
            ("adapted", "--self-generated", "--init-from", "x", "--profile", "y.yaml"),
            2,
            "--init-from brings its mask: leave --profile out",
        ),
        (("adapted", "--data", "/nowhere"), 1, "no such file or folder"),
        (("adapted", "--self-generated", "--budget", "soon"), 1, "is not a time"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...],
    code: int,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _, shown = run_in_process(
        capsys, monkeypatch, "train", *arguments, "--model", "demo", "--out", tmp_path
    )
    assert found == code
    assert reason in shown


def test_a_start_of_another_kind_is_refused_before_text_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(plan_kangaroo(lettered(), 2), text_here(), tmp_path, QUICK, "90%")
    assert first is not None
    monkeypatch.setattr(corpus, "generate_corpus", lambda *_: pytest.fail("text was written"))
    options = ("--model", "demo", "--self-generated", "--init-from", first.path)
    for command in ("kangaroo", "mtp"):
        code, _, shown = run_in_process(
            capsys, monkeypatch, "train", command, *options, "--out", tmp_path, "--threads", 1
        )
        assert code == 1
        assert str(first.path) in shown


@pytest.mark.slow
def test_a_training_that_is_killed_goes_on_from_less_than_a_minute_before(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(
        "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 400
    )
    command = [
        sys.executable,
        *cmd(
            "-m skipsearch.cli.main train adapted --model demo --data {} --out {} "
            "--draft-sublayers 1 --steps 100000 --batch-size 2 --threads 1",
            tmp_path / "text.txt",
            tmp_path / "m",
        ),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    running = subprocess.Popen(command, env=environment)
    while not (tmp_path / "m" / driver.CHECKPOINT).exists():
        time.sleep(1)
        assert running.poll() is None
    running.send_signal(signal.SIGKILL)
    running.wait()
    kept = torch.load(tmp_path / "m" / driver.CHECKPOINT, weights_only=True)
    command[command.index("100000")] = str(kept["done"] + 2)
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trained = json.loads(done.stdout)["card"]["trained"]
    assert trained["steps"] == kept["done"] + 2
    assert trained["seconds"] < kept["seconds"] + 20
