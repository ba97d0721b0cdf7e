"""The folder that an export writes: whole or not there, with all that belongs to the model, and a
README that can be followed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from helpers.byte_tokenizer import byte_tokenizer
from helpers.golden import check_golden
from models.tiny import LAYERS, hf_model, logits_without, some_tokens
from safetensors import safe_open

import skipsearch
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import ExportError, ModelError, ProfileError
from skipsearch.export import export_draft, export_profile, tensor_copy
from skipsearch.export.checkpoint import Checkpoint
from skipsearch.export.exportable import extract_exportable
from skipsearch.export.hf_checkpoint import Conversion
from skipsearch.export.readme import render_readme
from skipsearch.models.families.table import FAMILIES
from skipsearch.profile import load_profile

from .drafts import GOLDEN, logits_of_checkpoint, profile_for, saved

MASK = SkipMask.from_layers(LAYERS, (1,))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(hf_model("llama"), tmp_path / "model")


def export_from(source: Path, mask: SkipMask = MASK) -> list[str]:
    return export_draft(
        profile_for(str(source), "llama", mask), str(source), source.with_name("draft")
    )


# --- whole or not there


def test_nothing_that_exists_is_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(
        ExportError,
        match=r"draft exists already, and an export replaces nothing: choose another --out",
    ):
        export_from(source)
    (tmp_path / "draft").rmdir()
    (tmp_path / "draft").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExportError, match="exists already"):
        export_from(source)
    assert (tmp_path / "draft").is_symlink()


def test_an_existing_folder_is_found_out_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.setattr(export_profile, "open_checkpoint", lambda _: pytest.fail("work was begun"))
    with pytest.raises(ExportError, match="exists already"):
        export_from(source)


def test_a_folder_that_comes_meanwhile_is_not_replaced_either(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one would be, by the operating system."""
    monkeypatch.setattr(
        export_profile, "render_readme", lambda *_: (tmp_path / "draft").mkdir() or ""
    )
    with pytest.raises(ExportError, match="exists already"):
        export_from(source)
    assert os.listdir(tmp_path / "draft") == []


@pytest.mark.parametrize(
    "failure",
    [KeyboardInterrupt(), OSError(28, "No space left on device")],
    ids=["interrupted", "disk full"],
)
def test_an_export_that_stops_in_the_middle_leaves_nothing_behind(
    failure: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(export_profile, "render_readme", fail)  # the weights are written by then
    with pytest.raises((KeyboardInterrupt, ExportError)) as caught:
        export_from(source)
    assert os.listdir(tmp_path) == ["model"]
    if isinstance(caught.value, ExportError):
        assert re.fullmatch(
            r"cannot write .*draft: No space left on device; choose another --out",
            str(caught.value),
        )


def test_a_killed_export_leaves_no_folder_of_that_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        export_profile, "render_readme", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    child = multiprocessing.get_context("fork").Process(target=export_from, args=(source,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "draft").exists()
    monkeypatch.undo()
    export_from(source)  # and the next one is not in its way
    assert (tmp_path / "draft" / "model.safetensors").is_file()


def test_a_disk_without_room_is_found_out_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(tensor_copy.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(tensor_copy, "save_file", lambda *_, **__: pytest.fail("it was written"))
    with pytest.raises(
        ExportError, match=r"take 0\.0 GB and the disk of .* has 0\.0 GB free: make room there"
    ):
        export_from(source)


# --- what is in it


def test_what_belongs_to_the_model_comes_along_and_nothing_else_does(
    source: Path, tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(source)
    for name in (
        "LICENSE",
        "USE_POLICY.md",
        "chat_template.jinja",
        "modeling_x.py",
        "model.bin",
        "notes.txt",
        "README.md",
    ):
        (source / name).write_text(name)
    export_from(source)
    found = set(os.listdir(tmp_path / "draft"))
    assert found >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "LICENSE",
        "USE_POLICY.md",
        "chat_template.jinja",
        "README.md",
    }
    assert not found & {"modeling_x.py", "model.bin", "notes.txt"}
    assert (tmp_path / "draft" / "README.md").read_text() != "README.md"


def test_large_weights_come_in_shards_with_an_index(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_copy, "SHARD_BYTES", 30_000)
    draft, told = tmp_path / "draft", list[tuple[int, int]]()
    export_draft(
        profile_for(str(source), "llama", MASK),
        str(source),
        draft,
        lambda done, total: told.append((done, total)),
    )
    index = json.loads((draft / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (len(told), told[-1]) == (len(shards), (index["metadata"]["total_size"],) * 2)
    assert shards == sorted(path.name for path in draft.glob("*.safetensors"))
    for shard in shards:
        with safe_open(draft / shard, framework="pt") as stored:
            assert set(stored.keys()) == {
                name for name, file in index["weight_map"].items() if file == shard
            }
    tokens = some_tokens(12)
    torch.testing.assert_close(
        logits_of_checkpoint(draft, tokens),
        logits_without("llama", tokens, MASK),
        rtol=1e-9,
        atol=1e-9,
    )


def test_everybody_may_read_it(source: Path, tmp_path: Path) -> None:
    export_from(source)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "draft").iterdir()}
    assert len(modes) == 1


# --- what is refused


def test_a_profile_that_drafts_nothing_has_nothing_to_export(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"drafts nothing.*there is nothing to export"):
        export_draft(load_profile(GOLDEN / "v3_plain.yaml"), str(source), tmp_path / "draft")


LOOKUP = Lookup(min_match=3, draft_length=7)
SKIP = Skip.from_mask(MASK, 5, Fixed())


@pytest.mark.parametrize(
    ("drafters", "has"),
    [
        ((LOOKUP,), "drafts with lookup, which has no skip drafter"),
        ((LOOKUP, SKIP, Skip.from_mask(MASK, 6, Fixed())), "has 2 skip drafters"),
    ],
)
def test_a_recipe_without_exactly_one_skip_drafter_is_refused_before_any_work(
    drafters: tuple[DrafterSpec, ...],
    has: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_profile, "open_checkpoint", lambda _: pytest.fail("work was begun"))
    profile = profile_for("model", "llama", MASK).model_copy(update={"drafters": drafters})
    with pytest.raises(
        ExportError,
        match=f"{has}, and an export carries the mask of one: use it in skipsearch, or make one "
        "with",
    ):
        export_draft(profile, str(source), tmp_path / "draft")
    assert os.listdir(tmp_path) == ["model"]


def test_of_lookup_and_skip_the_skip_drafter_is_exported_and_the_rest_is_named(
    source: Path, tmp_path: Path
) -> None:
    warnings = export_draft(
        profile_for(str(source), "llama", MASK, LOOKUP), str(source), tmp_path / "draft"
    )
    assert (
        "lookup is left out, since no checkpoint can hold it: draft/README.md says more" in warnings
    )
    alone = export_draft(profile_for(str(source), "llama", MASK), str(source), tmp_path / "alone")
    assert not [warning for warning in alone if "is left out" in warning]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "draft" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_profile_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="5 layers, but model has 3"):
        export_draft(
            profile_for("org/other", "llama", SkipMask.from_layers(5, (1,))),
            str(source),
            tmp_path / "draft",
        )


def test_a_profile_of_other_weights_is_a_warning(source: Path, tmp_path: Path) -> None:
    warnings = export_draft(
        profile_for("org/other", "llama", MASK), str(source), tmp_path / "draft"
    )
    assert any("made for org/other, used with model" in warning for warning in warnings)


def test_a_draft_that_lost_to_plain_decoding_is_exported_with_a_warning(
    source: Path, tmp_path: Path
) -> None:
    lost = load_profile(GOLDEN / "v3_lost.yaml")
    lost = lost.model_copy(
        update={"model": profile_for("model", "llama", MASK).model, "lost": (SKIP,)}
    )
    (warning,) = export_draft(lost, str(source), tmp_path / "draft")
    assert "nothing beat plain decoding where this profile was made" in warning


def test_quantised_weights_are_refused(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(
        ExportError, match=r"stored as gptq-4bit.*export the model that it was made from"
    ):
        export_from(source)


def test_a_config_that_transformers_refuses_is_one_sentence(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(
        ModelError, match=r"config\.json cannot be used \([^\n]*\); take the original model's"
    ):
        export_from(source)


def test_a_damaged_weight_file_is_one_sentence(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ExportError, match="a weight file cannot be copied"):
        export_from(source)
    assert os.listdir(tmp_path) == ["model"]


# --- the README


def text_of(
    model: str = "org/model",
    name: str = "my-draft",
    before: tuple[DrafterSpec, ...] = (),
    caveats: tuple[str, ...] = (),
) -> str:
    source = Checkpoint(
        Path("/models/model"),
        model,
        "v2" if "/" in model else None,
        {},
        None,
        FAMILIES["llama"],
        [],
    )
    profile = profile_for(model, "llama", SkipMask.from_layers(16, (3, 4)), *before)
    return render_readme(
        profile, extract_exportable(profile), source, Conversion({}, str, caveats), name
    )


def test_the_readme_is_this() -> None:
    text = text_of().replace(f"skipsearch {skipsearch.__version__}:", "skipsearch 0.1.0:")
    check_golden(Path(__file__).parent / "golden" / "README_hf.md", text)


def test_the_readme_of_a_recipe_with_lookup_is_this() -> None:
    text = text_of(before=(LOOKUP,)).replace(
        f"skipsearch {skipsearch.__version__}:", "skipsearch 0.1.0:"
    )
    check_golden(Path(__file__).parent / "golden" / "README_lookup.md", text)


def test_a_caveat_stands_after_the_commands() -> None:
    assert text_of(caveats=("A caveat.",)).index("\nA caveat.\n") > text_of().index("## llama.cpp")


def test_it_says_that_lookup_is_left_out_and_which_engines_have_one_of_their_own() -> None:
    text = text_of(before=(LOOKUP,))
    assert "**Lookup is left out.** The profile drafts with `lookup,skip`" in text
    (vllm,) = re.findall(r"\| vLLM \| `--speculative-config (.*)` \|", text)
    assert json.loads(shlex.split(vllm)[0]) == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 16,
    }
    for said in (
        "--speculative-algorithm NGRAM",
        "decoding_type: NGram",
        "--spec-type ngram-simple",
        "prompt_lookup_num_tokens=7",
    ):
        assert said in text
    assert "ookup" not in text_of()


def test_the_readme_names_the_cost_of_a_second_copy_and_advises_to_tune_again() -> None:
    text = text_of()
    for said in (
        "**The weights here are a second copy.**",
        "**Tune the draft length again.**",
        "org/model@v2",
        "## vLLM",
        "## SGLang",
        "## TensorRT-LLM",
        "## llama.cpp",
        "## Transformers",
        "## The profile",
    ):
        assert said in text


@pytest.mark.parametrize("name", ["my-draft", "it's a draft"])
def test_its_commands_are_what_a_shell_understands(name: str) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", text_of("model", name), re.DOTALL)
    vllm, sglang, tensorrt, llama = (
        shlex.split(block.replace("\\\n", " ").replace("<<'END'", "")) for block in blocks
    )
    assert vllm[:3] == ["vllm", "serve", "/models/model"]
    assert json.loads(vllm[-1]) == {
        "method": "draft_model",
        "model": f"./{name}",
        "num_speculative_tokens": 5,
    }
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == f"./{name}"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "6"
    settings = yaml.safe_load(blocks[2].split("<<'END'\n")[1].split("END\n")[0])
    assert settings["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 5,
        "speculative_model": f"./{name}",
    }
    assert tensorrt[-4:] == ["trtllm-serve", "/models/model", "--config", "speculative.yaml"]
    assert llama[llama.index("--spec-draft-n-max") + 1] == "5"


def test_the_profile_that_it_came_from_is_in_it() -> None:
    quoted = text_of().split("## The profile\n\n```yaml\n")[1].removesuffix("```\n")
    (drafter,) = yaml.safe_load(quoted)["drafters"]
    assert (drafter["kind"], drafter["attn"], drafter["mlp"], drafter["draft_length"]) == (
        "skip",
        [3, 4],
        [3, 4],
        5,
    )
    assert (GOLDEN / "v3_unmeasured.yaml").read_text().splitlines()[0] == quoted.splitlines()[0]
