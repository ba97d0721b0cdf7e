"""Names on the Hub, against a local server that answers like it: what is downloaded, and the
sentence for each failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.gguf_files import write_model
from helpers.letter_tokenizer import letter_tokenizer
from helpers.tiny import tiny_llama
from huggingface_hub import constants
from safetensors.torch import load_file

from skipsearch.engine import load_model
from skipsearch.errors import ModelError
from skipsearch.models import load_adapter, load_tokenizer
from skipsearch.models.loading.aliases import ALIASES
from skipsearch.models.loading.hub import HUB_ID, download_gguf

from .fake_hub import ALLOWED, COMMIT, FakeHub, Repo
from .tiny import new_hf_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    new_hf_model("llama").to(torch.float32).save_pretrained(folder, max_shard_size="40KB")
    for extra in ("consolidated.safetensors", "pytorch_model.bin", "modeling_evil.py"):
        (folder / extra).write_bytes(b"not to be fetched")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    download_gguf.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def refusal(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_adapter(name, device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hub_id_is_downloaded_once_and_nothing_that_is_not_read(
    hub: FakeHub, model_folder: Path
) -> None:
    hub.add("org/tiny", model_folder)
    spec = load_adapter("org/tiny", device="cpu").spec
    assert (spec.id, spec.revision, spec.family) == ("org/tiny", None, "llama")
    assert spec.weights_sha256 == load_adapter(str(model_folder), device="cpu").spec.weights_sha256
    fetched = {
        path.rpartition("/")[2]
        for method, path in hub.served
        if method == "GET" and "/resolve/" in path
    }
    assert fetched == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        *(path.name for path in model_folder.glob("model-*.safetensors")),
    }
    hub.served.clear()
    load_adapter(f"org/tiny@{COMMIT}", device="cpu")
    assert hub.served == [], "a pinned commit that is there needs no network"


def test_a_tokenizer_comes_without_the_weights_which_follow_when_they_are_needed(
    hub: FakeHub, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.add("org/tiny", model_folder)
    letter_tokenizer().save_pretrained(tmp_path / "tokenizer")
    repo.files |= {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    tokenizer, context = load_tokenizer("org/tiny")
    assert (len(tokenizer("two").input_ids), context) == (4, 96)
    assert not any(path.endswith(".safetensors") for _, path in hub.served)
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert refusal("org/tiny") == (
            "org/tiny is only half downloaded and the Hub cannot be reached: connect, and the same "
            "command "
            "fetches the rest"
        )
    assert (
        load_adapter("org/tiny", device="cpu").tokenizer("two").input_ids
        == tokenizer("two").input_ids
    )


def test_a_revision_is_part_of_the_name(hub: FakeHub, model_folder: Path) -> None:
    hub.add("org/tiny", model_folder)
    for revision in ("v1", "refs/pr/4"):
        assert load_adapter(f"org/tiny@{revision}", device="cpu").spec.revision == revision
    assert (
        refusal("org/tiny@v2")
        == "org/tiny has no revision 'v2'; look up its branches and tags on its Hub page"
    )


def test_an_alias_is_its_hub_id(hub: FakeHub, model_folder: Path) -> None:
    hub.add("meta-llama/Llama-2-7b-hf", model_folder)
    assert load_adapter("Llama-2-7B", device="cpu").spec.id == "meta-llama/Llama-2-7b-hf"
    assert load_adapter("llama-2-7b@v1", device="cpu").spec.revision == "v1"


def test_a_gated_model_says_where_to_accept_its_licence(
    hub: FakeHub, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("meta-llama/Llama-2-13b-hf", model_folder, gated=True)
    sentence = (
        "meta-llama/Llama-2-13b-hf is gated: accept its licence on its Hub page, "
        "then log in with `hf auth login` as that user"
    )
    assert refusal("llama-2-13b") == sentence
    monkeypatch.setenv("HF_TOKEN", "hf_someone_else")
    assert refusal("llama-2-13b") == sentence
    monkeypatch.setenv("HF_TOKEN", ALLOWED)
    assert load_adapter("llama-2-13b", device="cpu").spec.id == "meta-llama/Llama-2-13b-hf"


def test_a_missing_or_private_model_is_a_matter_of_spelling_or_login(
    hub: FakeHub, model_folder: Path
) -> None:
    hub.add("org/secret", model_folder, private=True)
    for name in ("org/tyni", "org/secret"):
        assert refusal(name) == (
            f"the Hub has no model {name!r}, or it is private, and no folder has this name: check "
            "the spelling, or log in with "
            "`hf auth login`"
        )


def test_offline_the_cache_is_enough_and_without_it_the_sentence_says_so(
    hub: FakeHub, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", model_folder)
    load_adapter("org/tiny", device="cpu")
    hub.close()
    unreachable = (
        "org/other is not in the local cache and the Hub cannot be reached: connect once to "
        "download it, or give a folder that "
        "has it"
    )
    assert load_adapter("org/tiny", device="cpu").spec.id == "org/tiny"
    assert refusal("org/other") == unreachable
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_adapter("org/tiny", device="cpu").spec.id == "org/tiny"
    assert refusal("org/other") == unreachable


def test_half_a_download_is_completed_when_the_hub_is_back(
    hub: FakeHub, model_folder: Path, tmp_path: Path
) -> None:
    hub.add("org/tiny", model_folder)
    load_adapter("org/tiny", device="cpu")
    shard = next((tmp_path / "cache").rglob("snapshots/*/model-00002*"))
    shard.unlink()
    server, hub.broken = hub.broken, 503
    assert refusal("org/tiny") == (
        "org/tiny is only half downloaded and the Hub cannot be reached: connect, and the same "
        "command fetches the rest"
    )
    hub.broken = server
    assert load_adapter("org/tiny", device="cpu").spec.id == "org/tiny"


def test_a_connection_that_breaks_is_one_sentence(
    hub: FakeHub, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "time.sleep", lambda seconds: None
    )  # the client waits longer before each new try
    hub.add("org/tiny", model_folder, cut={"config.json": 20})
    message = refusal("org/tiny")
    assert message.startswith("downloading org/tiny failed (")
    assert message.endswith("): try again, or give a folder that has it")


def test_the_clients_own_bars_and_warnings_stay_off_a_pipe(
    hub: FakeHub,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repo = hub.add("org/tiny", model_folder, cut={"config.json": 20})
    refusal("org/tiny")
    repo.cut.clear()
    load_adapter("org/tiny", device="cpu")
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_one_sentence(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert (
        refusal("org/tiny")
        == "the disk is too full for org/tiny: free some space, or set HF_HOME to a larger disk"
    )


def test_pytorch_files_are_fetched_only_where_there_is_no_safetensors(
    hub: FakeHub, model_folder: Path, tmp_path: Path
) -> None:
    weights: dict[str, torch.Tensor] = {}
    for file in model_folder.glob("model*.safetensors"):
        weights |= load_file(file)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    pickled = (tmp_path / "pytorch_model.bin").read_bytes()
    both = hub.add("org/both", model_folder)
    both.files["pytorch_model.bin"] = pickled
    load_adapter("org/both", device="cpu")
    assert not any("pytorch_model.bin" in path for _, path in hub.served)
    old = hub.add("org/old", model_folder)
    old.files = {"config.json": old.files["config.json"], "pytorch_model.bin": pickled}
    assert load_adapter("org/old", device="cpu").spec.id == "org/old"


def test_models_that_lie_on_the_hub_in_a_form_we_do_not_read(
    hub: FakeHub, model_folder: Path
) -> None:
    other = hub.add("org/other", model_folder)
    other.files = {"config.json": other.files["config.json"], "model.gguf": b"GGUF"}
    assert "org/other has GGUF files: name one" in refusal("org/other")
    assert not any("model.gguf" in path for _, path in hub.served)

    other.files.pop("model.gguf")
    assert "has no weights; read are model.safetensors and pytorch_model.bin" in refusal(
        "org/other"
    )

    hub.add("org/encoder", model_folder).files["config.json"] = b'{"model_type": "t5"}'
    assert "t5 models cannot be driven exactly: an encoder feeds its decoder" in refusal(
        "org/encoder"
    )

    cut = hub.add("org/damaged", model_folder)
    name = next(file for file in cut.files if file.startswith("model-00002"))
    cut.files[name] = cut.files[name][:-7]
    assert re.search(
        r"model-00002-of-0\d+\.safetensors is cut short or damaged \(\d+ bytes\)",
        refusal("org/damaged"),
    )


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two formats, one of them split and in a folder; and a tower for images."""
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_llama(hidden=64).float()
    write_model(model, folder / "tiny-q8_0.gguf", "Q8_0")
    (folder / "UD-F32").mkdir()
    write_model(model, folder / "UD-F32" / "tiny-UD-F32.gguf", "F32", shards=8)
    return {
        **{str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.gguf")},
        "mmproj-tiny-Q8_0.gguf": b"GGUF",
        "README.md": b"not to be fetched",
    }


def refusal_of_file(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(name, device="cpu")
    return str(caught.value)


def test_a_gguf_file_of_a_repository_is_named_by_its_format(
    hub: FakeHub, gguf_files: dict[str, bytes]
) -> None:
    hub.repos["org/tiny-GGUF"] = Repo(dict(gguf_files))
    spec = load_model("org/tiny-GGUF:Q8_0", device="cpu", engine="hf").spec
    assert (spec.id, spec.quantization) == ("tiny-q8_0", "gguf-q8_0-float-activations")
    fetched = {path.partition(f"/{COMMIT}/")[2] for _, path in hub.served if "/resolve/" in path}
    assert fetched == {"tiny-q8_0.gguf"}
    assert (
        load_model("org/tiny-GGUF@v1:ud-f32", device="cpu", engine="hf").spec.n_layers
        == spec.n_layers
    )
    hub.close()
    assert load_model("org/tiny-GGUF:q8_0", device="cpu", engine="hf").spec == spec, (
        "from the cache"
    )


def test_a_format_that_a_repository_lacks_or_has_twice_is_refused_with_its_files(
    hub: FakeHub, gguf_files: dict[str, bytes]
) -> None:
    hub.repos["org/tiny-GGUF"] = Repo(dict(gguf_files))
    hub.repos["org/two"] = Repo({**gguf_files, "other-Q8_0.gguf": b"GGUF"})
    assert refusal_of_file("org/tiny-GGUF:Q4_K_M") == (
        "org/tiny-GGUF has no GGUF file in Q4_K_M; its GGUF files are: "
        + ", ".join(sorted(name for name in gguf_files if name.endswith(".gguf")))
    )
    assert refusal_of_file("org/two:Q8_0") == (
        "org/two has 2 models in Q8_0: give more of a name's end, of other-Q8_0 or tiny-q8_0"
    )
    assert "has no revision 'v9'" in refusal_of_file("org/tiny-GGUF@v9:Q8_0")
    assert "the Hub has no model 'org/none'" in refusal_of_file("org/none:Q8_0")


@pytest.mark.parametrize("name", ["org/a..b", "org/-x--y-"])
def test_names_that_the_hub_cannot_have_are_refused(hub: FakeHub, name: str) -> None:
    assert (
        refusal(name) == f"{name!r} is not a name that the Hub can have; a Hub id has the form "
        "org/name[@revision]"
    )


@pytest.mark.thorough
def test_the_environments_endpoint_is_the_one_that_is_asked(
    hub: FakeHub, model_folder: Path, tmp_path: Path
) -> None:
    hub.add("org/tiny", model_folder, gated=True)
    code = (
        "from skipsearch.models import load_adapter; "
        "print(load_adapter('org/tiny', device='cpu').spec)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": ALLOWED,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "org/tiny (llama, 3 layers) as float32 on cpu\n"


PAPERS = {
    *(f"llama-2-{size}{kind}" for size in ("7b", "13b", "70b") for kind in ("", "-chat")),
    *(f"codellama-{size}{kind}" for size in ("7b", "13b", "34b") for kind in ("", "-instruct")),
    *(f"llama-3-{size}{kind}" for size in ("8b", "70b") for kind in ("", "-instruct")),
    "llama-3.1-405b",
    "vicuna-7b",
    "vicuna-13b",
    "vicuna-33b",
    "phi-3-mini",
}
TODAY = (
    "qwen2.5-",
    "qwen3-",
    "mistral-",
    "gemma-2-",
    "gemma-3-",
    "smollm2-",
    "olmo-2-",
    "tinyllama-",
    "llama-3.2-",
    "llama-3.3-",
)


def test_every_model_of_the_papers_and_of_today_has_a_short_name() -> None:
    assert set(ALIASES) >= PAPERS
    assert [start for start in TODAY if not any(name.startswith(start) for name in ALIASES)] == []


@pytest.mark.parametrize("alias", ALIASES)
def test_a_short_name_is_lower_case_and_stands_for_one_hub_id(alias: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", alias)
    assert HUB_ID.fullmatch(ALIASES[alias])
    assert list(ALIASES.values()).count(ALIASES[alias]) == 1
    assert alias.split("-")[0].rstrip("0123456789.")[:4] in ALIASES[alias].lower()
