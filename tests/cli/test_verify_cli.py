"""`skipsearch profile verify`: its output, the files that it writes, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.profiles import GOLDEN, write_demo_profile
from helpers.threads import one_thread
from typer.testing import CliRunner, Result

from skipsearch.cli.options import LoadOptions
from skipsearch.cli.profile import app
from skipsearch.cli.verify import _defaults_from_claim, _output_path
from skipsearch.errors import ProfileError
from skipsearch.profile import Interval, load_profile, save_profile

__all__ = ["one_thread"]

MASK = {"attn": "[2, 3, 5, 8, 10, 13, 14, 15]", "mlp": "[2, 3, 5, 7, 8, 9, 11, 12, 13]"}
SPECULATE, UNMEASURED = (GOLDEN / f"v3_{verdict}.yaml" for verdict in ("speculate", "unmeasured"))


@pytest.fixture(autouse=True)
def _own_user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a task of two short generations to measure on."""
    folder = tmp_path_factory.mktemp("small")
    lines = [
        {"prompt": f'def {name}(path):\n    """{name.title()} the file."""\n    with open(path'}
        for name in ("read", "write", "parse", "check")
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "task.yaml").write_text(
        "name: small\nversion: 1\ndescription: a few short functions\nsource: {kind: jsonl, path: "
        "prompts.jsonl}\n"
        'template: "{prompt}"\nmax_new_tokens: 8\nmax_prompt_tokens: 64\nsampling: {temperature: '
        "0.0, top_p: 1.0, top_k: 0}\n"
        "calibration: 2\nholdout: 2\nseed: 0\nend_on_repeat: 6\n"
    )
    return folder


@pytest.fixture(scope="module")
def filled_in(tmp_path_factory: pytest.TempPathFactory, task: Path) -> tuple[Path, Result]:
    """Return a file in no repository, unmeasured until --write, and the output of the command."""
    file = write_demo_profile(tmp_path_factory.mktemp("mine") / "mine.yaml", **MASK)
    return file, run(file, "--task", task, "--write", "--json")


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments), "--device", "cpu"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_an_unmeasured_profile_is_measured_and_stays_as_it_is_without_write(
    tmp_path: Path, task: Path
) -> None:
    file = write_demo_profile(tmp_path / "mine.yaml", **MASK)
    before = file.read_bytes()
    done = run(file, "--task", task)
    assert done.exit_code == 0
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told[:4]] == ["claimed", "here", "time", "tokens"]
    assert "on 2 hold-out prompts of small" in told[1]
    assert told[3] == "tokens   identical to plain decoding on 2 of 2 prompts"
    assert told[-1].startswith("nothing was claimed; here it")
    assert file.read_bytes() == before


def test_write_fills_a_file_in_where_it_stands(filled_in: tuple[Path, Result]) -> None:
    file, done = filled_in
    answer = json.loads(done.stdout)
    assert answer["written"] == str(file)
    assert answer["outcome"] in ("pays", "does_not_pay")
    written = load_profile(file)
    assert written.measured is not None
    assert yaml.safe_load(file.read_text()) == answer["here"]
    assert (written.task.name, written.provenance.source) == (
        "small",
        load_profile(UNMEASURED).provenance.source,
    )


def test_strict_makes_a_claim_that_does_not_hold_exit_status_1(
    filled_in: tuple[Path, Result], tmp_path: Path, task: Path
) -> None:
    honest, file = load_profile(filled_in[0]), tmp_path / "boast.yaml"
    assert honest.measured is not None
    boast = honest.measured.model_copy(update={"speedup": Interval(mean=100.0, ci95=(90.0, 110.0))})
    recipe = {"verdict": "speculate", "drafters": honest.measured_recipe.drafters, "lost": ()}
    save_profile(honest.model_copy(update={**recipe, "measured": boast}), file)
    done = run(file, "--task", task, "--strict")
    assert done.exit_code == 1
    assert "the claim does not hold here" in done.stdout


def test_write_gives_the_measured_profile_of_a_repository_a_file_of_its_own(
    tmp_path: Path, task: Path
) -> None:
    file = write_demo_profile(tmp_path / "repository/profiles/demo/any/any--any.yaml", **MASK)
    run(file, "--task", task, "--write")
    assert load_profile(file).verdict == "unmeasured"
    (written,) = (tmp_path / "repository/profiles/demo/small").iterdir()
    assert load_profile(written).verdict != "unmeasured"
    checked = CliRunner().invoke(app, ["validate", str(tmp_path / "repository")])
    assert checked.stdout == "2 valid\n"
    with pytest.raises(
        ProfileError, match=r"exists already, a profile that was measured on such a device"
    ):
        run(file, "--task", task, "--write")


def test_write_keeps_out_of_pulled_repositories_since_the_next_pull_replaces_them(
    tmp_path: Path,
) -> None:
    pulled = tmp_path / "data/skipsearch/pulled/somebody/profiles/demo/any/any--any.yaml"
    model = SimpleNamespace(
        spec=SimpleNamespace(
            id="demo", device=torch.device("cpu"), dtype_name="float32", quantization=None
        )
    )
    assert (
        _output_path(pulled, model, "pycode").parent
        == tmp_path / "data/skipsearch/profiles/demo/pycode"
    )


OPEN = LoadOptions()
ON_A_CPU = LoadOptions("cpu", "bfloat16", "torchao-8bit", engine="native", threads=6)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (OPEN, ON_A_CPU),
        (LoadOptions("cpu", "float32"), replace(ON_A_CPU, dtype="float32")),
        (
            LoadOptions(quantization="torchao-4bit", engine="hf", threads=2),
            replace(ON_A_CPU, quantization="torchao-4bit", engine="hf", threads=2),
        ),
        (LoadOptions("cuda"), LoadOptions("cuda")),
    ],
    ids=["nothing set", "device and dtype", "the others", "another device"],
)
def test_what_is_left_open_is_as_it_was_claimed(given: LoadOptions, taken: LoadOptions) -> None:
    golden = load_profile(SPECULATE)
    claim = golden.model_copy(
        update={
            "hardware": golden.hardware.model_copy(update={"kind": "cpu", "threads": 6}),
            "engine": "native",  # type: ignore[union-attr]
            "model": golden.model.model_copy(
                update={"dtype": "bfloat16", "quantization": "torchao-8bit"}
            ),
        }
    )
    assert _defaults_from_claim(claim, given) == taken


@pytest.mark.parametrize(
    ("quantization", "taken"), [("native-8bit", "native-8bit"), ("gptq-4bit", None), (None, None)]
)
def test_a_quantization_that_loading_makes_is_as_it_was_claimed(
    quantization: str | None, taken: str | None
) -> None:
    golden = load_profile(SPECULATE)
    claim = golden.model_copy(
        update={
            "hardware": golden.hardware.model_copy(update={"kind": "cpu", "threads": 1}),
            "engine": "native",  # type: ignore[union-attr]
            "model": golden.model.model_copy(update={"quantization": quantization}),
        }
    )
    assert _defaults_from_claim(claim, OPEN) == LoadOptions(
        "cpu", claim.model.dtype, taken, engine="native", threads=1
    )


def test_nothing_is_taken_from_a_claim_that_this_machine_has_no_such_device_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _defaults_from_claim(load_profile(SPECULATE), OPEN) == OPEN
    assert _defaults_from_claim(load_profile(UNMEASURED), OPEN) == OPEN


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([SPECULATE, "--write"], "this one has been measured: `skipsearch tune` makes one"),
        ([UNMEASURED], "this profile is for any task: say with --task"),
        ([SPECULATE, "--prompts", "1"], "greater than or equal to 2"),
    ],
)
def test_a_request_that_makes_no_sense_is_a_usage_error(
    arguments: list[object], sentence: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
