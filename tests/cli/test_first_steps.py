"""First steps of a new user: version, help, completion, and a local model.

Commands refuse wrong arguments before the long work.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers.command import cmd, run_in_process
from helpers.golden import check_golden
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.profiles import write_demo_profile
from helpers.threads import one_thread
from models.tiny import new_hf_model

import skipsearch
from skipsearch.cli import options, progress
from skipsearch.cli.main import main
from skipsearch.cli.terminal import Terminal
from skipsearch.cli.tune_view import TuneView
from skipsearch.core.machine import Machine
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.decoding.decoder import MAX_REMEMBERED_TOKENS
from skipsearch.errors import ModelError, ProfileError, SearchError
from skipsearch.models import adapt, load_adapter
from skipsearch.models.families.table import family_of
from skipsearch.models.loading import placement
from skipsearch.models.loading.loader import make_adapter
from skipsearch.profile import load_profile, model_locations, save_profile
from skipsearch.tuning.events import StageProgress, StageStarted
from skipsearch.tuning.settings import parse_sublayers

__all__ = ["one_thread"]
GOLDEN = Path(__file__).parents[1] / "profile" / "golden"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("SKIPSEARCH_PROFILE_PATH", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    """Write a chat model to a folder, and its profile to ./profiles, as `tune` does."""
    folder = tmp_path / "models" / "chatty"
    new_hf_model("llama").save_pretrained(folder)
    letter_tokenizer(CHAT_TEMPLATE).save_pretrained(folder)
    spec = load_adapter(str(folder), device="cpu").spec
    data = yaml.safe_load((GOLDEN / "v3_speculate.yaml").read_text())
    data["model"] |= {
        "id": "chatty",
        "family": "llama",
        "n_layers": spec.n_layers,
        "config_sha256": spec.config_sha256,
        "weights_sha256": spec.weights_sha256,
        "dtype": "float32",
    }
    data["drafters"] = [{"kind": "lookup", "min_match": 1, "draft_length": 4}]
    data["measured"] = data["measured"] | {
        "by_drafter": [{"kind": "lookup", "rounds": 9, "drafted": 20, "accepted": 9}]
    }
    file = tmp_path / "profiles" / "chatty" / "pycode" / "some-cpu--float32.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    load_profile(file)
    return folder


# --- the program itself


def test_the_version_is_told(capsys, monkeypatch) -> None:
    assert run_in_process(capsys, monkeypatch, "--version") == (
        0,
        f"skipsearch {skipsearch.__version__}\n",
        "",
    )


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["profile"],
        ["task"],
        ["task", "show"],
        ["task", "validate"],
        ["tune"],
        ["decode"],
        ["bench"],
        ["bench", "run"],
        ["bench", "batch"],
        ["bench", "methods"],
        ["train"],
        ["train", "adapted"],
        ["train", "kangaroo"],
        ["train", "s3d"],
        ["train", "mtp"],
        ["export"],
        ["report"],
        ["list"],
        ["doctor"],
        ["chat"],
        ["serve"],
    ],
    ids=lambda command: " ".join(command) or "root",
)
def test_every_help_starts_with_an_example_and_no_flag_asks_for_a_value(
    capsys, monkeypatch, command: list[str]
) -> None:
    code, printed, _ = run_in_process(capsys, monkeypatch, *command, "--help")
    assert code == 0
    assert printed.split("\n\n")[1].strip().startswith("Example: skipsearch " + " ".join(command))
    assert "<bool>" not in printed


@pytest.mark.parametrize(
    "command",
    [
        "chat",
        "serve",
        "export",
        "bench",
        "bench run",
        "bench batch",
        "bench methods",
        "train",
        "train adapted",
        "train kangaroo",
        "train s3d",
        "train mtp",
    ],
)
def test_the_help_of_a_door_is_the_golden_file(capsys, monkeypatch, command: str) -> None:
    _, printed, _ = run_in_process(capsys, monkeypatch, *command.split(), "--help")
    check_golden(Path(__file__).parent / "golden" / f"{command.replace(' ', '_')}.txt", printed)


@pytest.mark.parametrize("group", ["bench", "train", "profile", "task"])
def test_a_group_alone_prints_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    _, usage, _ = run_in_process(capsys, monkeypatch, group, "--help")
    monkeypatch.setattr(sys, "argv", ["skipsearch", group])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.strip() == usage.strip()


def test_completion_knows_the_commands() -> None:
    asked = {
        "_SKIPSEARCH_COMPLETE": "complete_bash",
        "COMP_WORDS": "skipsearch de",
        "COMP_CWORD": "1",
    }
    program = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['skipsearch']; from skipsearch.cli.main import main; main()",
    ]
    done = subprocess.run(
        program,
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(skipsearch.__file__).parents[1],
    )
    assert done.stdout.split() == ["decode"]


def test_quiet_leaves_the_answer_and_the_warnings(capsys, monkeypatch) -> None:
    asked = (
        "decode",
        "--model",
        "demo",
        "--prompt",
        "import os\nimport",
        "--max-new-tokens",
        5000,
        "--stop",
        "\n",
        "--threads",
        1,
    )
    code, printed, said = run_in_process(capsys, monkeypatch, *asked)
    quiet = run_in_process(capsys, monkeypatch, "--quiet", *asked)
    assert code == quiet[0] == 0
    assert quiet[1] == printed
    assert "engine" in said
    assert "tokens/s" in said
    assert quiet[2].startswith(
        "warning: prompt: 5000 tokens were asked for, and after this prompt demo has room for"
    )
    assert "engine" not in quiet[2]
    code, _, said = run_in_process(
        capsys, monkeypatch, *cmd("--quiet decode --model demmo --prompt x")
    )
    assert code == 1
    assert "did you mean demo?" in said


def test_tab_completion_in_python_shows_the_api() -> None:
    assert {"Decoder", "generate", "tune"} <= set(dir(skipsearch))


# --- local models


def test_a_local_model_is_found_again_by_its_weights(
    capsys, monkeypatch, tmp_path: Path, local_model: Path
) -> None:
    profile = tmp_path / "profiles" / "chatty" / "pycode" / "some-cpu--float32.yaml"
    asked = ("decode", "--profile", profile, "--prompt", "say", "--max-new-tokens", 3)
    code, _, said = run_in_process(capsys, monkeypatch, *asked)
    assert code == 1
    assert (
        "for the local model 'chatty', and it has not been loaded on this machine yet: say where "
        "it lies with --model FOLDER" in said
    )
    assert run_in_process(capsys, monkeypatch, *asked, "--model", local_model)[0] == 0
    assert run_in_process(capsys, monkeypatch, *asked)[0] == 0
    assert str(local_model) not in profile.read_text()
    local_model.rename(local_model.with_name("renamed"))
    code, _, said = run_in_process(capsys, monkeypatch, *asked)
    assert code == 1
    assert "which is not there any more: say where it lies with --model FOLDER" in said


def test_auto_looks_in_the_folder_that_tune_writes_to_and_says_which_task_to_name(
    capsys, monkeypatch, local_model: Path
) -> None:
    asked = (
        "decode",
        "--profile",
        "auto",
        "--model",
        local_model,
        "--prompt",
        "say",
        "--max-new-tokens",
        3,
    )
    code, _, said = run_in_process(capsys, monkeypatch, *asked)
    assert code == 0
    assert "so decoding is plain; there is one for pycode: give --task pycode" in said
    code, _, said = run_in_process(capsys, monkeypatch, *asked, "--task", "pycdoe")
    assert code == 0
    assert "so decoding is plain; did you mean --task pycode?" in said
    code, _, said = run_in_process(capsys, monkeypatch, *asked, "--task", "pycode")
    assert code == 0
    assert "using profiles/chatty/pycode/some-cpu--float32.yaml" in said


def test_auto_knows_a_renamed_model_by_its_weights(capsys, monkeypatch, local_model: Path) -> None:
    other = local_model.rename(local_model.with_name("other"))
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "decode --profile auto --model {} --task pycode --prompt say --max-new-tokens 3", other
        ),
    )
    assert code == 0
    assert "a model of another name with the same weights: chatty" in said
    assert "using profiles/chatty/pycode" in said


def test_a_damaged_list_of_models_is_no_list(tmp_path: Path) -> None:
    model = load_profile(GOLDEN / "v3_speculate.yaml").model.model_copy(update={"id": "chatty"})
    for text in ("{", "[1]", '{"x": 3}', "[" * 100000):
        (tmp_path / "data" / "skipsearch").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "skipsearch" / "models.json").write_text(text)
        with pytest.raises(ProfileError, match="say where it lies"):
            model_locations.model_argument(model)
    model_locations.record_location(str(model.weights_sha256), tmp_path)
    assert model_locations.model_argument(model) == str(tmp_path)


# --- requests


def test_several_texts_stand_under_their_names_and_conversations_are_taken(
    capsys, monkeypatch, tmp_path: Path, local_model: Path
) -> None:
    rows = [
        {"id": "one", "prompt": "abc"},
        {
            "id": "two",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "ai", "content": "b"},
                {"role": "user", "content": "c"},
            ],
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = (
        "decode",
        "--model",
        local_model,
        "--prompts",
        tmp_path / "rows.jsonl",
        "--max-new-tokens",
        3,
    )
    code, printed, said = run_in_process(capsys, monkeypatch, *asked)
    assert code == 0, said
    assert [line for line in printed.splitlines() if line.startswith("==")] == [
        "== one ==",
        "== two ==",
    ]
    _, printed, _ = run_in_process(capsys, monkeypatch, *asked, "--json")
    assert [json.loads(line)["prompt_tokens"] for line in printed.splitlines()] == [
        4,
        1 + len("user:a\nai:b\nuser:c\nai:"),
    ]
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd("decode --model demo --prompts {} --json", tmp_path / "rows.jsonl"),
    )
    assert code == 1
    assert "has no chat template, so nothing says how it reads a conversation" in said
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    code, _, said = run_in_process(capsys, monkeypatch, *asked)
    assert code == 1
    assert "a turn of its conversation is" in said


def test_standard_input_is_answered_line_by_line(capsys, monkeypatch) -> None:
    class Slow(io.RawIOBase):
        """A stream that returns its second line only after the first was answered."""

        lines = [b'{"prompt": "class A"}\n', b'{"prompt": "def b"}\n']  # noqa: RUF012

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def, override]
            if len(self.lines) == 1:
                printed.append(capsys.readouterr().out)
                assert len(json.loads(printed[0])["tokens"]) == 2
            line = self.lines.pop(0) if self.lines else b""
            buffer[: len(line)] = line
            return len(line)

    printed: list[str] = []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Slow())))
    code, rest, said = run_in_process(
        capsys, monkeypatch, *cmd("decode - --model demo --max-new-tokens 2 --json")
    )
    assert code == 0, said
    assert len(json.loads(rest)["tokens"]) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (cmd("decode --model demo --prompt x --temperature -1"), "temperature is -1"),
        (cmd("decode --model demo --prompt x --top-p 3"), "top_p is 3"),
        (cmd("tune --model demo --task pycode --out there.yaml"), "there.yaml exists already"),
        (
            cmd("tune --model demo --task pycode --never-skip attention"),
            "'attention' names no sub-layer: write attn:0",
        ),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_loaded(
    capsys, monkeypatch, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(options, "load_cli_model", load)
    monkeypatch.setattr("skipsearch.cli.open_model.load_cli_model", load)
    monkeypatch.setattr("skipsearch.cli.tune.load_cli_model", load)
    (tmp_path / "there.yaml").write_text("mine")
    code, _, said = run_in_process(capsys, monkeypatch, *arguments)
    assert code == 1
    assert sentence in said


# --- profiles, machines, progress


def test_python_replaces_a_profile_no_more_unasked_than_the_command_does(tmp_path: Path) -> None:
    profile, path = load_profile(GOLDEN / "v3_speculate.yaml"), tmp_path / "x.yaml"
    path.write_text("mine")
    with pytest.raises(
        ProfileError, match="exists already and says something else: pass replace=True"
    ):
        save_profile(profile, path)
    assert path.read_text() == "mine"
    save_profile(profile, path, replace=True)
    save_profile(profile, path)  # a file with the same content may exist
    assert load_profile(path) == profile


def test_the_list_of_profiles_shows_each_path_whole(capsys, monkeypatch, tmp_path: Path) -> None:
    path = write_demo_profile(tmp_path / ("long" * 40) / "demo" / "any" / "any--any.yaml")
    code, printed, _ = run_in_process(
        capsys, monkeypatch, "profile", "list", "--profiles", path.parents[2]
    )
    assert code == 0
    assert printed.splitlines()[0] == str(path)
    assert "demo, any: skip, unmeasured" in printed.splitlines()[1]


def test_sub_layers_to_keep_are_read_from_text() -> None:
    assert parse_sublayers("attn:0, mlp:3") == {0, 7}
    assert parse_sublayers(None) == frozenset()
    for text in ("attn", "attn:-1", "mlp:x", ",", "head:1"):
        with pytest.raises(SearchError, match="names no sub-layer: write attn:0"):
            parse_sublayers(text)


def test_one_thread_is_one_thread() -> None:
    assert [Machine("cpu", "X", 1, n).description for n in (1, 2)] == [
        "X, 1 thread",
        "X, 2 threads",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 s"),
        (7.4, "7 s"),
        (99, "99 s"),
        (100, "2 min"),
        (3600, "60 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_times_are_told_in_words(seconds: float, words: str) -> None:
    assert progress.format_duration(seconds) == words


def test_progress_says_what_is_left_on_80_columns_and_no_note_outlives_its_stage() -> None:
    said = io.StringIO()
    console = Terminal(file=said, width=80, force_terminal=True, color_system=None)
    trial = Trial(SkipMask(20, (1, 2, 3)), 0.01, baseline_seconds_per_token=0.013, alpha=0.7)
    with TuneView(console) as view:
        view(StageStarted("searching masks with auto (replay objective)"))
        assert view.stage is not None
        task = view.bar.tasks[0]
        task.start_time = 0.0
        clock = iter([float(i) for i in range(1, 500)])
        view.bar.get_time = lambda: next(clock)
        for done in range(1, 6):
            view(StageProgress(done, 40, trial, trial))
        lines = [line.rstrip() for line in _shown(view).splitlines()]
        assert lines[0].startswith("trial 5, best predicted 1.30×, α 0.70, skips 3")
        assert lines[0].endswith(" left")
        view(StageStarted("racing the best recipes under real decoding"))
        view(StageProgress(1, 10))
        lines = _shown(view).splitlines()
        assert lines[0].startswith("searching masks with auto")
        assert "took" in lines[0]
        assert lines[1].startswith("racing the best recipes under real deco")
        assert "trial" not in "".join(lines)


def _shown(view: TuneView) -> str:
    console = Terminal(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(view.bar.get_renderable())
    return captured.get()


def test_apples_gpu_is_taken_where_there_is_one_by_the_engine_hf_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelError, match="sees no GPU of Apple's here; use --device cpu"):
        placement.pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = placement.pick_device("mps")
    assert (device.type, placement.pick_dtype("auto", device)) == ("mps", torch.bfloat16)
    with pytest.raises(ModelError, match="Apple's GPUs have none"):
        placement.pick_dtype("float64", device)
    model = new_hf_model("llama")
    spec = replace(adapt(model).spec, device=device)
    assert make_adapter(model, spec, family_of(model.config), None, "auto").spec.engine == "hf"
    with pytest.raises(
        ModelError,
        match=r"the engine lean cannot drive .* never run on Apple's GPUs; use --engine hf",
    ):
        make_adapter(model, spec, family_of(model.config), None, "lean")


@pytest.mark.parametrize(
    ("option", "value"), [("--threads", 100_000), ("--lookup-history", MAX_REMEMBERED_TOKENS + 1)]
)
def test_a_number_that_is_too_large_is_refused_by_its_option(
    capsys, monkeypatch, option: str, value: int
) -> None:
    code, _, said = run_in_process(
        capsys, monkeypatch, "decode", "--model", "demo", "--prompt", "x", option, value
    )
    assert code == 2
    assert f"Invalid value for '{option}'" in said


def test_a_warning_names_a_setting_in_a_line_of_prompts(capsys, monkeypatch, tmp_path) -> None:
    lines = [{"prompt": "a", "label": 1}, {"prompt": "b", "max_tokens": 9}, {"prompt": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd("decode --model demo --engine lean --max-new-tokens 2 --prompts"),
        tmp_path / "rows.jsonl",
    )
    assert code == 0, said
    assert said.count("warning:") == 1
    assert "line 2 sets max_tokens, and a line sets its prompt alone: give --max-new-tokens" in said
