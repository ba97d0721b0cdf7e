"""`load_adapter` from folders: what comes back, and one sentence that says what to do for each way
it can fail.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.letter_tokenizer import letter_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import skipsearch as ss
from skipsearch.decoding import Decoder
from skipsearch.engine import forward
from skipsearch.errors import ModelError, UnusedWeightsWarning
from skipsearch.models import adapt, load_adapter
from skipsearch.models.chat.chat_text import encode_prompt
from skipsearch.models.kv_cache import Planner
from skipsearch.models.loading.hub import DEMO_FOLDER
from skipsearch.models.loading.weight_files import list_weight_files

from .tiny import SHAPE, Run, new_hf_model, randomised, some_tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    new_hf_model("llama").to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    new_hf_model("llama").to(torch.float32).save_pretrained(
        tmp_path / "sharded", max_shard_size="20KB"
    )
    return tmp_path / "sharded"


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**data, **changes}.items() if v is not None}))


def refusal(name: object, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_adapter(str(name), **{"device": "cpu", **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_gives_the_model_that_was_saved_into_it(saved: Path) -> None:
    model = load_adapter(str(saved), device="cpu", dtype="float32")
    spec = model.spec
    assert (
        spec.id,
        spec.revision,
        spec.family,
        spec.n_layers,
        spec.hidden_size,
        spec.vocab_size,
        spec.context_length,
    ) == ("tiny-llama", None, "llama", 3, 32, 61, 96)
    assert (spec.dtype, spec.dtype_name, spec.device, spec.quantization, spec.eos_token_ids) == (
        torch.float32,
        "float32",
        torch.device("cpu"),
        None,
        (1,),
    )
    assert str(spec) == "tiny-llama (llama, 3 layers) as float32 on cpu"
    tokens = some_tokens(9)
    theirs = AutoModelForCausalLM.from_pretrained(saved)(input_ids=tokens).logits[0]
    torch.testing.assert_close(Run(model)(tokens), theirs, rtol=1e-4, atol=1e-4)
    unmodified = load_adapter(str(saved), device="cpu", engine="hf")
    assert not any(weight.requires_grad for weight in unmodified.model.parameters())  # type: ignore[attr-defined]


def test_weights_in_several_files_are_one_model(saved: Path, sharded: Path) -> None:
    assert len(list_weight_files(sharded, "x")) > 1
    tokens = some_tokens(9)
    torch.testing.assert_close(
        Run(load_adapter(str(sharded), "cpu"))(tokens), Run(load_adapter(str(saved), "cpu"))(tokens)
    )


def test_without_a_tokenizer_a_model_works_on_token_ids(saved: Path) -> None:
    assert load_adapter(str(saved), device="cpu").tokenizer is None


def test_a_tokenizer_comes_with_the_model_if_its_folder_has_one() -> None:
    model = load_adapter("demo", device="cpu")
    ids = model.tokenizer("def add(a, b):").input_ids
    assert ids
    assert model.tokenizer.decode(ids) == "def add(a, b):"


def test_the_demo_is_a_small_llama_with_an_end_and_a_context() -> None:
    model = load_adapter("demo", device="cpu")
    assert (model.spec.id, model.spec.family, model.spec.revision) == ("demo", "llama", None)
    assert 16 <= model.spec.n_layers <= 24
    assert model.spec.context_length
    assert model.spec.eos_token_ids
    assert model.spec.dtype == torch.float32
    assert sum(path.stat().st_size for path in DEMO_FOLDER.glob("*.safetensors")) <= 20e6
    tokens = torch.tensor([model.tokenizer("import os\n").input_ids])
    cache = model.new_cache(1, 16)
    assert (
        forward(model, tokens, cache, Planner(16, model.spec.device).plan_chain(0, tokens.shape[1]))
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtype_is_what_was_asked_for(saved: Path, dtype: str) -> None:
    spec = load_adapter(str(saved), device="cpu", dtype=dtype).spec
    assert spec.dtype_name == dtype


def test_experts_run_in_float64_too(tmp_path: Path) -> None:
    new_hf_model("qwen3_moe").save_pretrained(tmp_path / "moe")
    model, tokens = (
        load_adapter(str(tmp_path / "moe"), device="cpu", dtype="float64"),
        some_tokens(9),
    )
    torch.testing.assert_close(
        Run(model)(tokens),
        new_hf_model("qwen3_moe")(input_ids=tokens).logits[0],
        rtol=1e-5,
        atol=1e-5,
    )


def test_hashes_are_of_content_and_not_of_place_or_dtype(saved: Path, folder: Path) -> None:
    here, there = (
        load_adapter(str(saved), "cpu", "float32").spec,
        load_adapter(str(folder), "cpu", "bfloat16").spec,
    )
    assert here.config_sha256 == there.config_sha256
    assert here.weights_sha256 == there.weights_sha256
    assert (
        here.config_sha256
        == adapt(AutoModelForCausalLM.from_pretrained(folder).eval()).spec.config_sha256
    )

    edit(
        folder / "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        transformers_version="0.0.1",
    )
    (folder / "notes.safetensors.txt").write_text("not a weight")
    changed = load_adapter(str(folder), "cpu").spec
    assert changed.config_sha256 != here.config_sha256
    assert changed.weights_sha256 == here.weights_sha256

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_adapter(str(folder), "cpu").spec.weights_sha256 != here.weights_sha256


def test_a_path_is_a_name_and_a_model_in_memory_is_none(saved: Path) -> None:
    assert ss.load_model(saved, device="cpu").spec.id == saved.name
    with pytest.raises(ModelError, match=r"a LlamaForCausalLM is no name .* `adapt` takes"):
        ss.load_model(new_hf_model("llama"))  # type: ignore[arg-type]


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    assert refusal("lama-2-13b") == (
        "there is no model called 'lama-2-13b'; did you mean llama-2-13b? `skipsearch list models` "
        "shows the short names, a Hub id has "
        "the form org/name[@revision], and no folder has this name"
    )
    assert "did you mean" not in refusal("zzzz")
    assert refusal(" ") == (
        "the model name is empty; use demo, a short name (`skipsearch list models`), a Hub id or a "
        "folder"
    )


def test_a_path_that_is_no_model_folder_says_so(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path / "nowhere")
        == f"there is no folder {tmp_path}/nowhere; check the path, or give a Hub id "
        "(org/name[@revision])"
    )
    (tmp_path / "file").write_text("")
    assert (
        refusal(tmp_path / "file")
        == f"{tmp_path}/file is a file, and no GGUF file; give the folder that holds "
        "config.json and the weights"
    )
    assert refusal(tmp_path) == (
        f"{tmp_path} has no config.json, so it is no Hugging Face model folder: give the one that "
        "has it"
    )


def test_a_config_that_says_nothing_useful_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")
    assert "is not readable JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "names no model_type" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "num_attention_heads": "many"}')
    assert "its config.json cannot be used" in refusal(folder)


@pytest.mark.parametrize("part", ["text_config", "decoder", "generator"])
@pytest.mark.parametrize("value", [{}, {"hidden_size": 32}, [1], "x"])
def test_a_part_of_another_familys_config_is_refused_by_name(
    folder: Path, part: str, value: object
) -> None:
    """transformers takes it for the config of the text model."""
    edit(folder / "config.json", **{part: value})
    assert f"its config.json has {part} " in refusal(folder)


def test_an_unsupported_family_is_named(folder: Path) -> None:
    AutoConfig.for_model("deepseek_v32").save_pretrained(folder)
    assert "no rule here says what layers of the kind" in refusal(folder)
    (folder / "config.json").write_text("{}")
    edit(folder / "config.json", model_type="t5")
    assert "an encoder feeds its decoder" in refusal(folder)
    edit(folder / "config.json", model_type="llama-of-2030")
    assert "knows no model_type 'llama-of-2030'; if it is new, update transformers" in refusal(
        folder
    )


def test_code_that_comes_with_a_model_is_never_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('the code of a model was run')")
    edit(
        folder / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    assert "evil models bring their own code, which is never run" in refusal(folder)
    edit(folder / "config.json", model_type="llama")
    assert (
        load_adapter(str(folder), "cpu").spec.family == "llama"
    )  # transformers has its own code for this family


def pickled(folder: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """The folder's weights as PyTorch files in the place of safetensors."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return weights
    files = {
        name: f"pytorch_model-{1 + i % shards:05}-of-{shards:05}.bin"
        for i, name in enumerate(weights)
    }
    for file in set(files.values()):
        torch.save(
            {name: weight for name, weight in weights.items() if files[name] == file}, folder / file
        )
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    return weights


@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files_are_read_as_tensors_alone(folder: Path, saved: Path, shards: int) -> None:
    pickled(folder, shards)
    assert len(list_weight_files(folder, "x")) == shards
    tokens = some_tokens(9)
    torch.testing.assert_close(
        Run(load_adapter(str(folder), "cpu"))(tokens), Run(load_adapter(str(saved), "cpu"))(tokens)
    )
    (folder / "config.json").write_text(
        (folder / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 3', '"num_hidden_layers": 9')
    )
    assert "config.json asks for 9 layers and the weights have 3" in refusal(folder)


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.mark, "code of a model was run")


@pytest.mark.parametrize(("shards", "legacy"), [(1, False), (3, False), (1, True)])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(
    folder: Path, tmp_path: Path, shards: int, legacy: bool
) -> None:
    mark, weights = tmp_path / "was-run", pickled(folder, shards)
    last = list_weight_files(folder, "x")[-1]
    for planted in ({**weights, "more": Planted(mark)}, Planted(mark)):
        torch.save(planted, last, _use_new_zipfile_serialization=not legacy)
        assert refusal(folder) == (
            f"{last} is a pickle that holds more than tensors, and could run code if it were "
            "opened: it was not; "
            "take a revision that has safetensors"
        )
    last.write_bytes(pickle.dumps(Planted(mark)))
    assert "it was not; take a revision" in refusal(folder)
    assert not mark.exists()
    torch.load(_saved(Planted(mark), tmp_path / "proof.bin"), weights_only=False)
    assert mark.exists(), "what was planted does nothing, so this test shows nothing"


def _saved(what: Any, path: Path) -> Path:
    torch.save(what, path)
    return path


def test_pytorch_files_that_hold_no_weights_or_are_damaged_are_named(folder: Path) -> None:
    weights = pickled(folder)
    path = folder / "pytorch_model.bin"
    torch.save([1, 2], path)
    assert "holds no table of weights" in refusal(folder)
    torch.save(weights, path)
    path.write_bytes(path.read_bytes()[:-2000])
    assert "pytorch_model.bin is cut short or damaged" in refusal(folder)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "Git LFS pointer" in refusal(folder)
    path.rename(folder / "weights.pt")
    assert (
        "holds its weights under another name (weights.pt); read are model.safetensors and "
        "pytorch_model.bin" in refusal(folder)
    )
    (folder / "weights.pt").unlink()
    assert "has no weights" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "holds an adapter and not a whole model: merge it into its base" in refusal(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    assert refusal(sharded) == (
        f"{sharded}: {sharded} lacks {shards[1].name} of the {len(shards)} weight files that its "
        "index lists: the download is not "
        "complete, run it again"
    )
    (sharded / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../etc/passwd"}}'
    )
    assert "is not a readable index of the weight files beside it" in refusal(sharded)


def test_damaged_weights_are_found_before_they_are_read(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert refusal(folder) == (
        f"{weights} is cut short or damaged ({len(whole) - 100} bytes): delete it and download it "
        "again"
    )
    for broken, sentence in (
        (whole[:5], "is cut short or damaged (5 bytes)"),
        (b"", "is cut short or damaged (0 bytes)"),
        (whole[:8] + b"#" + whole[9:], f"is cut short or damaged ({len(whole)} bytes)"),
        (b"\x02" + bytes(7) + b"{}", "asks for 3 layers and the weights have 0"),
        (b"\xff" * 50, "is cut short or damaged (50 bytes)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "run `git lfs pull` in that folder",
        ),
    ):
        weights.write_bytes(broken)
        assert sentence in refusal(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=64)
    assert refusal(folder) == (
        f"{folder}: model.layers.0.mlp.down_proj.weight is stored as [32, 48] and the config asks "
        "for [32, 64]: config.json and weights "
        "belong to two models, download both again"
    )


def stored(entry: object) -> bytes:
    """A file of 4 bytes of weights, and what its header says of them."""
    header = json.dumps({"w": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


NO_TENSORS: list[object] = [
    {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]},
    {"dtype": "F32"},
    7,
]


@pytest.mark.parametrize("entry", NO_TENSORS, ids=str)
def test_a_header_that_describes_no_tensor_is_refused(folder: Path, entry: object) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(stored(entry))
    assert (
        refusal(folder)
        == f"{weights} is cut short or damaged ({weights.stat().st_size} bytes): delete it and "
        "download it again"
    )


def test_a_header_nested_without_end_is_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    header = b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    assert (
        refusal(folder)
        == f"{weights} is cut short or damaged ({weights.stat().st_size} bytes): delete it and "
        "download it again"
    )
    (folder / "model.safetensors.index.json").write_bytes(header)
    assert "is not a readable index of the weight files beside it" in refusal(folder)


def test_a_header_larger_than_any_is_not_read(folder: Path) -> None:
    weights = folder / "model.safetensors"
    with weights.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # a hole: it takes no room
    assert (
        refusal(folder)
        == f"{weights} is cut short or damaged (300000000 bytes): delete it and download it again"
    )


def test_weights_that_lack_what_the_config_asks_for_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert (
        "the weights lack model.layers.1.mlp.up_proj.weight of what the config asks for"
        in refusal(folder)
    )


def add_weights(folder: Path, **weights: torch.Tensor) -> None:
    """Add tensors to a folder's weights, or replace them; a name has __ for a dot."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): weight for name, weight in weights.items()}
    save_file({**load_file(path), **named}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    ["layers__0__self_attn__q_norm__weight", "layers__3__mlp__up_proj__weight", "norm__bias"],
)
def test_a_weight_that_would_change_the_model_is_not_dropped(folder: Path, name: str) -> None:
    add_weights(folder, **{f"model__{name}": torch.ones(32)})
    assert refusal(folder) == (
        f"{folder}: the weights hold model.{name.replace('__', '.')}, which is no part of the "
        "model that config.json describes: config.json and weights belong to two models, download "
        "both again"
    )


@pytest.mark.parametrize("name", ["v_head__summary__weight", "model__visual__patch_embed__weight"])
def test_a_warning_names_weights_beside_the_model(folder: Path, name: str) -> None:
    add_weights(folder, **{name: torch.ones(1, 32), "z_head": torch.ones(1)})
    with pytest.warns(UnusedWeightsWarning, match=f"{name.replace('__', '.')} and 1 more"):
        load_adapter(str(folder), device="cpu")


def test_tables_that_are_computed_may_be_stored(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    model = new_hf_model("llama-tied").to(torch.float32)
    model.save_pretrained(folder)
    layer = "model__layers__0__self_attn__"
    add_weights(
        folder,
        lm_head__weight=model.get_input_embeddings().weight.clone(),
        **{f"{layer}rotary_emb__inv_freq": torch.ones(4), f"{layer}masked_bias": torch.ones(1)},
        **{f"{layer}attention__bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedWeightsWarning)
        load_adapter(str(folder), device="cpu")


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_weight_that_is_no_float_is_refused(folder: Path, dtype: str, suffix: str) -> None:
    add_weights(folder, model__norm__weight=torch.ones(32, dtype=getattr(torch, dtype)))
    if suffix == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    assert re.search(
        rf"model.norm.weight is stored as {dtype[0]}\w+, and weights are floats", refusal(folder)
    )


def test_a_tokenizer_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{broken")
    assert f"the tokenizer in {folder} cannot be read" in refusal(folder)


def test_a_tokenizer_that_the_library_gives_up_on_is_named(folder: Path) -> None:
    """It gives up on this one with an exception that is no `Exception`."""
    letter_tokenizer().save_pretrained(folder)
    edit(
        folder / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "pair": [],
            "special_tokens": {},
            "single": [{"SpecialToken": {"id": "<gone>", "type_id": 0}}],
        },
    )
    with pytest.raises(ModelError, match="cannot read a text of 5 characters"):
        encode_prompt(load_adapter(str(folder), "cpu").tokenizer, "hello")


def test_a_tokenizer_class_that_is_no_tokenizer_is_refused(folder: Path) -> None:
    letter_tokenizer().save_pretrained(folder)
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaConfig")
    assert f"the tokenizer in {folder} cannot be read" in refusal(folder)


def test_a_name_that_can_be_no_folder_is_refused(tmp_path: Path) -> None:
    assert "can be no folder (File name too long); check the path, or give a Hub id" in refusal(
        "a" * 5000
    )
    assert "can be no folder (Could not determine home directory" in refusal(
        "~nobody-has-this-name/model"
    )


def test_devices_and_dtypes_that_do_not_exist_are_refused(saved: Path) -> None:
    assert refusal(saved, dtype="float31").startswith(
        "there is no dtype called 'float31'; did you mean float32?"
    )
    assert (
        refusal(saved, device="gpu")
        == "there is no device called 'gpu'; use auto, cpu, cuda, cuda:N or mps"
    )
    assert (
        refusal(saved, device="xla")
        == "device 'xla' is not supported; use auto, cpu, cuda, cuda:N or mps"
    )
    if not torch.backends.mps.is_available():
        assert (
            refusal(saved, device="mps")
            == "device mps was asked for, and torch sees no GPU of Apple's here; use --device cpu"
        )


# Family with a tower for images -> its text, and the tower.
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "head_dim": 8,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
         "out_hidden_size": 32, "num_position_embeddings": 16},
    ),
    "gemma4": (
        {"head_dim": 8, "global_head_dim": 8, "sliding_window": 8,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "hidden_size_per_layer_input": 0},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", TOWERS)
def test_a_model_with_a_tower_for_images_writes_its_text(family: str, tmp_path: Path) -> None:
    text, tower = TOWERS[family]
    config = AutoConfig.for_model(
        family, text_config={**SHAPE, "pad_token_id": 0, **text}, vision_config=tower
    )
    model = randomised(AutoModelForImageTextToText.from_config(config)).eval()
    model.save_pretrained(tmp_path)
    tokens = some_tokens(6)
    expected = model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=-1)
    adapter = load_adapter(str(tmp_path), device="cpu", dtype="float32", engine="hf")
    written = Decoder(adapter).generate(tokens[0].tolist(), 12, ignore_eos=True).tokens
    assert written == expected[0, 6:].tolist()
