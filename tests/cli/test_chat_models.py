"""A chat model from start to end: requests use its template in `tune` and in `decode --chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import cmd, run_in_process
from helpers.costs import made_up_costs
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.threads import one_thread
from models.tiny import new_hf_model

from skipsearch.cli.options import profile_model_argument
from skipsearch.profile import load_profile
from skipsearch.replay.workload import template_sha256
from skipsearch.tasks import load_task

__all__ = ["made_up_costs", "one_thread"]


def save_model(folder: Path, chat_template: str | None) -> None:
    new_hf_model("llama").save_pretrained(folder)
    letter_tokenizer(chat_template).save_pretrained(folder)


def write_task(folder: Path) -> None:
    """Write a task of four requests."""
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("one", "two", "three", "four")
        )
    )
    (folder / "task.yaml").write_text(
        "name: sayings\nversion: 1\ndescription: requests\nsource: {kind: jsonl, path: "
        'rows.jsonl}\ntemplate: "{prompt}"\nchat: true\n'
        "max_new_tokens: 12\nmax_prompt_tokens: 40\nsampling: {}\ncalibration: 2\nholdout: "
        "2\nseed: 0\nend_on_repeat: 6\n"
    )


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """The folder of a chat model, next to a task of requests."""
    save_model(tmp_path / "chatty", CHAT_TEMPLATE)
    write_task(tmp_path)
    return tmp_path / "chatty"


@pytest.mark.usefixtures("made_up_costs")
def test_tune_records_the_template_and_decode_says_how_to_use_it(
    tmp_path: Path,
    chatty: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, profile = (
        ("--model", chatty, "--dtype", "float64", "--json"),
        tmp_path / "profile.yaml",
    )
    status, printed, said = run_in_process(
        capsys,
        monkeypatch,
        "tune",
        *model,
        "--task",
        tmp_path,
        "--searcher",
        "middle",
        "--trials",
        2,
        "--out",
        profile,
    )
    assert status == 0, said
    assert "has no chat template" not in said
    template = json.loads(printed)["profile"]["task"]["chat_template_sha256"]
    assert (
        template
        == template_sha256(load_task(tmp_path), letter_tokenizer(CHAT_TEMPLATE))
        is not None
    )

    request = ("decode", *model, "--profile", profile, "--prompt", "say one", "--max-new-tokens", 4)
    prompt_tokens = []
    for options in ((), ("--chat",), ("--no-chat",)):
        status, printed, _ = run_in_process(capsys, monkeypatch, *request, *options)
        assert status == 0
        prompt_tokens.append(json.loads(printed)["prompt_tokens"])
    in_template = 1 + len("user:say one\nai:")
    assert prompt_tokens == [in_template, in_template, 1 + len("say one")]


@pytest.mark.usefixtures("made_up_costs")
def test_a_file_of_requests_goes_through_the_template_with_an_option(
    tmp_path: Path,
    chatty: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, model = tmp_path / "rows.jsonl", ("--model", chatty, "--dtype", "float64")
    search = ("tune", *model, "--task", rows, "--searcher", "middle", "--trials", 2)
    outputs = {}
    for name, options in {"plain": (), "chat": ("--chat",)}.items():
        out = tmp_path / f"{name}.yaml"
        status, _, said = run_in_process(
            capsys, monkeypatch, *search, "--out", out, *options, "--json"
        )
        assert status == 0, said
        outputs[name] = load_profile(out).task.chat_template_sha256, said
    assert "go in without it" in outputs["plain"][1]
    assert outputs["plain"][0] is None
    assert "go in without it" not in outputs["chat"][1]
    assert outputs["chat"][0] is not None
    verify = ("profile", "verify", tmp_path / "chat.yaml", *model, "--task", rows, "--json")
    status, printed, said = run_in_process(capsys, monkeypatch, *verify)
    assert "another chat template" not in printed + said


def test_decode_reads_a_published_line_as_a_request_to_a_chat_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "chatty", CHAT_TEMPLATE)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"question": "how", "answer": "so"}) + "\n")
    decode = ("decode", "--model", tmp_path / "chatty", "--prompts", lines, "--json")
    for option, text in (("--chat", "user:how\nai:"), ("--no-chat", "Question: how\nAnswer:")):
        status, printed, said = run_in_process(capsys, monkeypatch, *decode, option)
        assert status == 0, said
        assert json.loads(printed)["prompt_tokens"] == 1 + len(text)


@pytest.mark.usefixtures("made_up_costs")
def test_a_file_is_tuned_and_verified_for_sampled_requests(
    tmp_path: Path,
    chatty: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = ("--model", chatty, "--dtype", "float64", "--task", tmp_path / "rows.jsonl")
    out = tmp_path / "profile.yaml"
    tune = ("tune", *task, "--chat", "--searcher", "middle", "--trials", 2, "--out", out)
    status, _, said = run_in_process(
        capsys, monkeypatch, *tune, *cmd("--temperature 0.8 --top-p 0.9")
    )
    assert status == 0, said
    profile = load_profile(out)
    sampling = profile.task.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.9, 0)
    assert profile.measured is not None
    assert profile.measured.lossless.prompts == 0, "samples are not compared"
    verify = ("profile", "verify", out, *task, "--json")
    status, printed, said = run_in_process(capsys, monkeypatch, *verify)
    assert "temperature" not in " ".join(json.loads(printed)["differences"])
    assert json.loads(printed)["here"]["task"]["sampling"]["temperature"] == 0.8
    for wrong, sentence in (
        (("--top-p", 0.9), "give --temperature, too"),
        (("--temperature", -1), "temperature is -1.0; it is a number that lies in"),
        (("--temperature", 1, "--top-k", -1), "top_k is -1; it is a whole number"),
    ):
        status, _, said = run_in_process(capsys, monkeypatch, *tune, *wrong)
        assert status != 0
        assert sentence in said


@pytest.mark.parametrize(("revision", "expected"), [(None, "org/tiny"), ("v1", "org/tiny@v1")])
def test_a_profile_names_its_model_with_the_revision_it_was_made_for(
    revision: str | None, expected: str
) -> None:
    golden = load_profile(Path(__file__).parents[1] / "profile" / "golden" / "v3_unmeasured.yaml")
    model = golden.model.model_copy(update={"id": "org/tiny", "revision": revision})
    assert profile_model_argument(golden.model_copy(update={"model": model})) == expected


@pytest.mark.usefixtures("made_up_costs")
def test_tune_warns_that_a_base_model_gets_requests_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "base", None)
    write_task(tmp_path)
    out = tmp_path / "profile.yaml"
    search = ("--task", tmp_path, "--searcher", "middle", "--trials", 1, "--out", out)
    status, printed, said = run_in_process(
        capsys, monkeypatch, "tune", "--model", tmp_path / "base", *search, "--json"
    )
    assert status == 0, said
    assert "has no chat template: it gets them unchanged, as text to continue" in said
    assert json.loads(printed)["profile"]["task"].get("chat_template_sha256") is None
