"""`skipsearch profile …`: data on stdout, messages on stderr, exit status 0, 1 or 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.golden import check_golden
from typer.testing import CliRunner, Result

from skipsearch.cli.profile import app
from skipsearch.errors import ProfileError
from skipsearch.profile import load_profile
from skipsearch.profile.schema import json_schema

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "profile" / "golden"
SPECULATE, PLAIN, UNMEASURED, MIXED = (
    GOLDEN / f"v3_{name}.yaml" for name in ("speculate", "plain", "unmeasured", "mixed")
)
PLACE = Path("profiles/demo/pycode/nvidia-h200--float32.yaml")
COMMANDS = ["list", "show", "validate", "diff", "import", "pull", "verify", "schema"]


@pytest.fixture(autouse=True)
def _own_user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("SKIPSEARCH_PROFILE_PATH", raising=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Write a profile repository with one good profile."""
    folder = tmp_path / "repository"
    (folder / PLACE).parent.mkdir(parents=True)
    shutil.copy(SPECULATE, folder / PLACE)
    return folder


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_each_commands_help_starts_with_an_example() -> None:
    for command in COMMANDS:
        help_text = run(command, "--help").stdout
        assert (
            help_text.split("\n\n")[1].strip().startswith(f"Example: skipsearch profile {command}")
        ), command
    overview = run("--help").stdout
    assert all(f"  {command} " in overview for command in COMMANDS)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c != "verify"]
)  # its options are most commands' own
def test_the_help_of_each_command_is_the_golden_file(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    check_golden(
        Path(__file__).parent / "golden" / f"profile_{command}.txt", run(command, "--help").stdout
    )


def test_a_failure_is_one_sentence_on_stderr_and_status_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skipsearch.cli.main", "profile", "show", "missing.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: missing.yaml: there is no such file")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_argument_is_a_usage_error() -> None:
    assert run("show").exit_code == 2
    assert run("import", SPECULATE).exit_code == 2


def test_show_tells_the_profile_in_words_and_draws_the_mask() -> None:
    shown = run("show", SPECULATE).stdout
    for said in (
        "demo, llama, 16 layers, float32",
        "NVIDIA H200, engine graph",
        "1.337× (1.310–1.366) on 32 hold-out prompts",
        "drafts   skip 3 sub-layers, adaptive 0.6 for 0.9, up to 8",
        "32 of 32 prompts identical",
        "layer 0    5    10   15",
        "attn  ",
    ):
        assert said in shown
    assert "other engines" not in shown, "they have no draft that skips sub-layers"
    assert "its speed is unknown" in run("show", UNMEASURED).stdout


def test_show_has_the_commands_of_other_engines_for_a_draft_model() -> None:
    shown = run("show", MIXED.with_name("v3_draft_model.yaml")).stdout
    for said in (
        "drafts   draft-model small.gguf, confidence 0.5, up to 6",
        "or else  draft-model org/small@main, without 3 sub-layers, int4, 4,102 tokens of the ",
        "llama-server -m MODEL.gguf -md small.gguf --spec-type draft-simple",
        "--spec-draft-n-max 6 --spec-draft-p-min 0.5",
        'vllm serve MODEL --speculative-config \'{"method": "draft_model", "model": "small.gguf", ',
        "--speculative-draft-model-path small.gguf --speculative-num-steps 6",
    ):
        assert said in shown


def test_show_names_each_drafter_and_draws_a_mask_only_where_there_is_one(tmp_path: Path) -> None:
    shown = run("show", MIXED).stdout
    for said in (
        "drafts   lookup: 2 tokens must match, copies up to 16, at most 4 per matched token",
        "or else  skip 3 sub-layers",
        "lookup   400 rounds, 3200 tokens drafted, 1900 accepted (59%)",
        "attn  ",
        "--spec-draft-n-max 16 --spec-ngram-simple-size-n 2",
        'vllm serve MODEL --speculative-config \'{"method": "ngram",',
    ):
        assert said in shown
    lookups = tmp_path / "lookup.yaml"
    lookups.write_text(
        "".join(line for line in MIXED.read_text().splitlines(True) if "kind: skip" not in line)
    )
    for path, drafts in (
        (PLAIN, "drafts   nothing"),
        (lookups, "drafts   lookup: 2 tokens must match"),
    ):
        shown = run("show", path).stdout
        assert drafts in shown
        assert "attn  " not in shown


def test_show_json_is_the_profiles_content() -> None:
    data = json.loads(run("show", SPECULATE, "--json").stdout)
    (drafter,) = data["drafters"]
    assert list(drafter.items())[:4] == [
        ("kind", "skip"),
        ("attn", [3, 4]),
        ("mlp", [7]),
        ("draft_length", 8),
    ]
    assert list(data)[:3] == ["schema_version", "model", "task"]


def test_validate_accepts_a_good_file_and_a_good_repository(repository: Path) -> None:
    assert run("validate", SPECULATE, MIXED, UNMEASURED, PLAIN).stdout == "4 valid\n"
    assert run("validate", repository).stdout == "1 valid\n"
    assert run("validate", repository / "profiles").stdout == "1 valid\n"


def test_validate_names_every_fault_of_a_repository(repository: Path) -> None:
    (repository / "profiles/demo/broken.yaml").write_text("schema_version: 99\n")
    (repository / "profiles/demo/link.yaml").symlink_to(repository / PLACE)
    shutil.copy(SPECULATE, repository / "profiles/demo/misplaced.yaml")
    result = CliRunner().invoke(app, ["validate", str(repository)])
    assert isinstance(result.exception, ProfileError)
    assert str(result.exception) == "3 of 4 profiles are not valid"
    faults = result.stderr.splitlines()
    assert len(faults) == 3
    for name, fault in zip(("broken.yaml", "link.yaml", "misplaced.yaml"), faults, strict=True):
        assert name in fault


def test_validate_json_has_an_entry_for_each_file(repository: Path) -> None:
    (repository / "profiles/demo/broken.yaml").write_text("schema_version: 99\n")
    result = CliRunner().invoke(app, ["validate", str(repository), "--json"])
    assert [entry["valid"] for entry in json.loads(result.stdout)] == [False, True]


def test_validating_an_empty_folder_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no \*\.yaml file in this folder"):
        run("validate", tmp_path)


def test_diff_tells_masks_drafters_settings_and_intervals(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MIXED.read_text().replace("attn: [3, 4]", "attn: [4, 5]"))
    told = run("diff", SPECULATE, other).stdout
    for said in (
        "50% of what either skips",
        "only A       attention 3, MLP none",
        "only B       attention 5, MLP none",
        "1.337 (1.310–1.366) and 1.337 (1.310–1.366), not apart",
        'drafters: skip → "lookup,skip"',
        'drafters.lookup: null → "lookup: 2 tokens must match, copies up to 16, at most 4 per '
        'matched token"',
        "drafters.skip.exit.across_requests: null → true",
    ):
        assert said in told
    told = run("diff", SPECULATE, PLAIN).stdout
    assert "verdict: speculate → plain" in told
    assert "Jaccard" not in told
    assert json.loads(run("diff", SPECULATE, SPECULATE, "--json").stdout)["jaccard"] == 1.0


def test_import_writes_profiles_where_they_belong(tmp_path: Path) -> None:
    source = tmp_path / "skip_layers.json"
    source.write_text(json.dumps({"llama-2-13b": {"attention": [3, 5], "mlp": [6]}}))
    place = tmp_path / "out/profiles/meta-llama--Llama-2-13b-hf/any/any--any.yaml"
    assert run("import", source, "--out", tmp_path / "out").stdout == f"{place}\n"
    assert load_profile(place).verdict == "unmeasured"
    assert run("validate", tmp_path / "out").stdout == "1 valid\n"


def test_import_replaces_nothing_that_says_something_else(tmp_path: Path) -> None:
    source = tmp_path / "skip_layers.json"
    source.write_text(
        json.dumps(
            {
                "llama-2-70b": {"attention": [3], "mlp": []},
                "llama-2-13b": {"attention": [3, 5], "mlp": [6]},
            }
        )
    )
    assert (
        run("import", source, "--out", tmp_path).exit_code
        == run("import", source, "--out", tmp_path).exit_code
        == 0
    )
    mine = tmp_path / "profiles/meta-llama--Llama-2-13b-hf/any/any--any.yaml"
    mine.write_text(mine.read_text().replace("attn: [3, 5]", "attn: [3, 5, 7]"))
    shutil.rmtree(tmp_path / "profiles/meta-llama--Llama-2-70b-hf")
    with pytest.raises(
        ProfileError, match=r"any--any\.yaml exists already and says something else: move it away"
    ):
        run("import", source, "--out", tmp_path)
    assert "attn: [3, 5, 7]" in mine.read_text()
    assert not (tmp_path / "profiles/meta-llama--Llama-2-70b-hf").exists()


def test_list_shows_model_task_device_speedup_and_source(repository: Path) -> None:
    (listed,) = [
        entry
        for entry in json.loads(run("list", "--profiles", repository, "--json").stdout)
        if entry["file"] == str(repository / PLACE)
    ]
    assert listed["source"] == str(repository)
    assert listed["profile"]["measured"]["speedup"]["mean"] == 1.337
    shown = run("list", "--profiles", repository).stdout.splitlines()
    assert shown[0] == str(repository / PLACE), "whole, so that it can be copied"
    for said in ("demo, pycode: skip", "1.337×", "NVIDIA H200", f"({repository})"):
        assert said in shown[1]


def test_list_warns_of_a_file_that_is_no_profile_and_goes_on(repository: Path) -> None:
    (repository / PLACE).with_name("broken.yaml").write_text("schema_version: 99\n")
    result = run("list", "--profiles", repository)
    assert "demo" in result.stdout
    assert "update skipsearch" in result.stderr


def test_pull_fetches_a_repository_and_list_names_its_origin(repository: Path) -> None:
    (repository / "profiles/demo/broken.yaml").write_text("schema_version: 99\n")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "profiles"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    result = run("pull", f"file://{repository}", "--json")
    pulled = json.loads(result.stdout)
    assert len(pulled["kept"]) == len(pulled["refused"]) == 1
    assert "rejected: profiles/demo/broken.yaml, line 1: schema_version 99" in result.stderr
    sources = [entry["source"] for entry in json.loads(run("list", "--json").stdout)]
    assert f"file://{repository}@{pulled['commit'][:12]}" in sources
    assert "1 profile from file://" in run("pull", f"file://{repository}").stdout


def test_schema_prints_the_json_schema() -> None:
    assert json.loads(run("schema").stdout) == json_schema()
