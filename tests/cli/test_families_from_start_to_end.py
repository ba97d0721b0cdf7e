"""`tune` and `decode` on a tiny random model of each family, from a folder to tokens.

The tokens must be those of plain decoding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import run_in_process
from helpers.costs import made_up_costs
from helpers.letter_tokenizer import letter_tokenizer
from helpers.marks import slow, thorough
from helpers.threads import one_thread
from models.every_class import build
from models.tiny import TINY, new_hf_model

from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.skip.spec import Skip
from skipsearch.profile import load_profile, save_profile

__all__ = ["made_up_costs", "one_thread"]

# Plain, sinks, ALiBi, latent, chunks; and what takes longer: short convolutions, other scores,
# experts, linear attention, Mamba with attention, in separate layers, row by row, and alone.
BY_STRUCTURE = ["starcoder2", "mimo_v2_flash", "bloom", "deepseek_v3", "llama4_text"]
QUICK = ["gemma3", "mixtral", "bloom"]  # what sets families apart: windows, experts, positions
THOROUGH = [
    "llama",
    "gpt2",
    "gpt_oss",
    "mimo_v2_flash",
    "deepseek_v3",
    "starcoder2",
    "lfm2",
    "phi",
    "falcon_h1",
]
SLOW = [
    name
    for name in (
        *TINY,
        *BY_STRUCTURE,
        "mpt",
        "granitemoe",
        "qwen3_5_text",
        "qwen3_next",
        "nemotron_h",
        "granitemoehybrid",
        "jamba",
        "mamba2",
    )
    if name not in (*QUICK, *THOROUGH)
]

TASK = """\
name: openings
version: 1
description: how functions begin
source: {kind: jsonl, path: rows.jsonl}
template: "{prompt}"
max_new_tokens: 10
max_prompt_tokens: 40
sampling: {temperature: 0.0}
calibration: 3
holdout: 3
seed: 0
end_on_repeat: 6
"""
UNMEASURED = {
    "verdict": "unmeasured",
    "engine": None,
    "hardware": None,
    "software": None,
    "measured": None,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openings")
    prompts = [
        f"def {name}(path):\n    with open(path"
        for name in ("read", "write", "parse", "check", "load", "store")
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    (folder / "task.yaml").write_text(TASK)
    return folder


def drafting(tuned: Path) -> Path:
    """Return the tuned profile with a mask that drafts.

    Whether the tuned recipe drafts depends on measured times.
    """
    drafters = {
        "drafters": (Skip(attn=(1,), mlp=(0, 2), draft_length=4, exit=Fixed()),),
        "lost": (),
    }
    save_profile(
        load_profile(tuned).model_copy(update=UNMEASURED | drafters),
        tuned.with_name("drafting.yaml"),
    )
    return tuned.with_name("drafting.yaml")


@pytest.mark.usefixtures("made_up_costs")
@pytest.mark.parametrize("name", [*QUICK, *thorough(*THOROUGH), *slow(*SLOW)])
def test_tune_writes_a_profile_and_decode_gives_the_full_models_tokens(
    name: str,
    task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, tuned = tmp_path / name, tmp_path / "tuned.yaml"
    (new_hf_model(name) if name in TINY else build(name)).save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    model = ("--model", folder, "--dtype", "float64", "--json")
    capsys.readouterr()
    status, printed, said = run_in_process(
        capsys,
        monkeypatch,
        "tune",
        *model,
        "--task",
        task,
        "--searcher",
        "middle",
        "--trials",
        3,
        "--out",
        tuned,
    )
    assert status == 0, said
    profile = json.loads(printed)["profile"]
    lossless = profile["measured"]["lossless"]
    assert profile["model"]["family"] == (TINY[name].family if name in TINY else name)
    assert lossless["identical"] == lossless["prompts"] > 0

    for file in (tuned, drafting(tuned)):
        status, printed, said = run_in_process(
            capsys,
            monkeypatch,
            "decode",
            *model,
            "--profile",
            file,
            "--prompts",
            task / "rows.jsonl",
            "--max-new-tokens",
            10,
            "--check",
        )
        assert status == 0, said
        rows = [json.loads(line) for line in printed.splitlines()]
        assert len(rows) == 6
        assert all(row["check"]["identical"] for row in rows)
    assert sum(row["stats"]["drafted"] for row in rows) > 0


def test_without_a_tokenizer_both_say_that_text_cannot_be_read(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_hf_model("llama").save_pretrained(tmp_path / "mute")
    model = ("--model", tmp_path / "mute")
    status, _, said = run_in_process(
        capsys, monkeypatch, "tune", *model, "--task", task, "--out", tmp_path / "x.yaml"
    )
    assert (status, said.count("error:")) == (1, 1)
    assert not list(tmp_path.glob("x.*")), (
        "nothing is left behind that would stand in the way of the next try"
    )
    assert (
        "mute has no tokenizer, so the text of task openings cannot be given to it: put its "
        "tokenizer files beside its weights" in said
    )
    status, _, said = run_in_process(capsys, monkeypatch, "decode", *model, "--prompt", "x")
    assert status == 1
    assert (
        "mute has no tokenizer, so it takes token ids only: use Decoder.generate from Python"
        in said
    )
