"""What a stranger's config.json may say: no code is fetched or run for it, and nonsense in it is
one sentence, at once.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.letter_tokenizer import letter_tokenizer
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from skipsearch.errors import ModelError, SkipSearchError
from skipsearch.models import load_adapter, load_tokenizer
from skipsearch.models.loading.config import load_config
from skipsearch.models.loading.hub import DEMO_FOLDER

from .tiny import new_hf_model

FAMILIES = ("llama", "gemma3", "gpt2", "mixtral")


@pytest.fixture(scope="module")
def all_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        new_hf_model(family).to(torch.float32).save_pretrained(place / family)
    return place


@pytest.fixture
def folder(all_saved: Path, tmp_path: Path) -> Path:
    return copied(all_saved, tmp_path, "llama")


def copied(saved: Path, place: Path, family: str) -> Path:
    return Path(shutil.copytree(saved / family, place / family))


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    path.write_text(
        json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **changes})
    )


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_adapter(str(folder), device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers calls for a kernel of the Hub; it runs what it fetches."""

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetch)
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    "key",
    [
        "_attn_implementation",
        "attn_implementation",
        "_experts_implementation",
        "_attn_implementation_internal",
    ],
)
def test_a_config_cannot_ask_for_a_kernel_of_the_hub(folder: Path, key: str) -> None:
    edit(folder, **{key: "org/kernel@main"})
    assert refusal(folder) == (
        f'{folder}: its config.json asks for "org/kernel@main" as {key}, a kernel from the Hub, '
        "and no code that comes with a model is "
        f"ever run; remove {key} from config.json"
    )
    edit(folder, **{key: {"": "sdpa", "text_config": "paged|org/kernel:forward"}})
    assert 'asks for "paged|org/kernel:forward"' in refusal(folder)


@pytest.mark.usefixtures("no_kernels")
def test_nor_can_a_config_inside_a_config(all_saved: Path, tmp_path: Path) -> None:
    folder = copied(all_saved, tmp_path, "gemma3")
    whole = json.loads((folder / "config.json").read_text())
    for part in ("text_config", "vision_config"):
        edit(folder, **{**whole, part: {**whole[part], "_attn_implementation": "org/kernel"}})
        assert 'asks for "org/kernel" as _attn_implementation' in refusal(folder)
        edit(
            folder, **{**whole, part: {**whole[part], "_attn_implementation": "flash_attention_2"}}
        )
        assert load_adapter(str(folder), device="cpu").spec.family == "gemma3"


@pytest.mark.parametrize(
    "value", ["eager", "flash_attention_2", "flex_attention", "nonsense", None, 3]
)
def test_how_a_model_attends_is_the_loaders_own_choice(folder: Path, value: Any) -> None:
    edit(folder, _attn_implementation=value, attn_implementation=value)
    model: Any = load_adapter(str(folder), device="cpu", engine="hf")
    assert model.model.config._attn_implementation == "sdpa"


def test_what_leads_to_other_files_or_code_is_not_there_for_transformers(folder: Path) -> None:
    (folder / "other.json").write_text('{"model_type": "gpt2"}')
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    plain = load_adapter(str(folder), device="cpu").spec
    edit(
        folder,
        configuration_files=["other.json", "config.5.0.0.json"],
        transformers_weights="nowhere.safetensors",
        auto_map={"AutoModelForCausalLM": "org/name--evil.Model"},
        fusion_config={"x": True},
        use_kernels=True,
        attribute_map={"num_hidden_layers": "eos_token_id"},
        to_dict="text",
        custom_generate="org/name",
        _auto_class="AutoModel",
    )
    (folder / "config.5.0.0.json").write_text('{"model_type": "gpt2"}')
    assert load_adapter(str(folder), device="cpu").spec == plain


def test_every_config_is_read_as_transformers_reads_it(all_saved: Path) -> None:
    for family in FAMILIES:
        theirs = AutoConfig.from_pretrained(all_saved / family).to_dict()
        assert load_config(all_saved / family, family).to_dict() == theirs
    assert load_config(DEMO_FOLDER, "demo").name_or_path == str(DEMO_FOLDER)


def test_a_distributed_checkpoint_or_an_adapter_beside_the_weights_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would read the first in the place of the weights, and put the second on top of
    them where peft is installed.
    """
    (folder / "adapter_config.json").write_text("{}")
    monkeypatch.setattr("skipsearch.models.loading.weight_files.find_spec", lambda _: None)
    assert load_adapter(str(folder), device="cpu").spec.n_layers == 3
    monkeypatch.setattr("skipsearch.models.loading.weight_files.find_spec", lambda name: name)
    assert "holds an adapter beside a whole model: merge it" in refusal(folder)
    shutil.copy(
        folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors"
    )
    assert (
        "holds a distributed checkpoint (shard-00001-model-00001-of-00001.safetensors), which is "
        "not read" in refusal(folder)
    )


def test_a_config_nested_without_end_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    )
    assert (
        refusal(folder)
        == f"{folder}: {folder}/config.json is nested too deep to be read; download it again"
    )
    (folder / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * 40 + "]" * 40 + "}")
    assert (
        refusal(folder)
        == f"{folder}: its config.json is nested more than 30 levels deep; take the original "
        "model's"
    )


@pytest.mark.parametrize("layers", [1_000_000, 4, 0, -1])
def test_layers_that_are_not_stored_are_never_made(folder: Path, layers: int) -> None:
    edit(folder, num_hidden_layers=layers)
    assert refusal(folder) == (
        f"{folder}: config.json asks for {layers} layers and the weights have 3: config.json and "
        "weights belong to two models, download "
        "both again"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("num_attention_heads", 10**9),
        ("num_labels", 10**12),
        ("num_hidden_layers", 1e300),
    ],
)
def test_no_model_has_so_many_of_anything(folder: Path, key: str, value: float) -> None:
    edit(folder, **{key: value})
    assert f"its config.json asks for {key} {value}, and no model has more than 1000000" in refusal(
        folder
    )
    letter_tokenizer().save_pretrained(folder)
    with pytest.raises(ModelError, match=f"asks for {key}"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 10**11),
        ("hidden_size", 2**31),
        ("intermediate_size", 10**12),
        ("head_dim", 10**11),
    ],
)
def test_sizes_that_fill_the_memory_are_refused_before_anything_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int
) -> None:
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        lambda *_, **__: pytest.fail("was loaded"),
    )
    edit(folder, **{key: value})
    told = refusal(folder)
    assert (
        "weights and the files hold 27,840: config.json and weights belong to two models, download "
        "both again" in told
    )


def test_tables_that_are_computed_count_too(tmp_path: Path) -> None:
    new_hf_model("phi").to(torch.float32).save_pretrained(tmp_path / "phi")
    edit(
        tmp_path / "phi",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1e10,
        },
    )
    assert "config.json asks for 80,000,023,277 weights and the files hold 23,277" in refusal(
        tmp_path / "phi"
    )


def test_a_stored_quantization_that_transformers_does_not_know_is_refused(folder: Path) -> None:
    for settings, shown in (
        ({"quant_method": "magic", "bits": 4}, '"magic"'),
        ({}, "null"),
        ({"quant_method": ["gptq"]}, '["gptq"]'),
        (["gptq"], '["gptq"]'),
    ):
        edit(folder, quantization_config=settings)
        assert (
            f"its config.json says that the weights are quantised by {shown}, which transformers"
            in refusal(folder)
        )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (61, "61"),
        (-1, "-1"),
        ("1", '"1"'),
        ([1, [2]], "[1, [2]]"),
        ([[1]], "[[1]]"),
        (True, "true"),
        (1.0, "1.0"),
        ({"id": 1}, '{"id": 1}'),
    ],
)
def test_a_token_that_ends_an_answer_is_one_of_the_vocabulary(
    folder: Path, value: Any, shown: str
) -> None:
    rule = (
        f"is {shown}, and tokens are whole numbers from 0 to 60: write the id of the token that "
        "ends an answer, a list of such ids, "
        "or null"
    )
    edit(folder, "generation_config.json", eos_token_id=value)
    assert refusal(folder) == f"{folder}: the eos_token_id of generation_config.json {rule}"
    (folder / "generation_config.json").unlink()
    edit(folder, eos_token_id=value)
    told = refusal(folder)
    assert (
        told == f"{folder}: the eos_token_id of config.json {rule}"
        or "its config.json cannot be used" in told
    )


def test_tokens_that_end_an_answer_are_read_where_they_are(folder: Path) -> None:
    for value, ids in ((7, (7,)), ([7, 60, 0], (7, 60, 0)), ([], ()), (None, (1,))):
        edit(folder, "generation_config.json", eos_token_id=value)
        assert load_adapter(str(folder), device="cpu").spec.eos_token_ids == ids


@pytest.mark.parametrize("value", [61, 10**9, -62])
def test_a_padding_token_is_one_of_the_vocabulary(folder: Path, value: int) -> None:
    edit(folder, pad_token_id=value)
    assert refusal(folder) == (
        f"{folder}: the pad_token_id of config.json is {value}, and tokens are whole numbers from "
        "0 to 60: write null there"
    )
    edit(folder, pad_token_id=-1)  # as some models of the Hub have it
    assert load_adapter(str(folder), device="cpu").spec.vocab_size == 61


def test_a_broken_generation_config_is_not_passed_over(folder: Path) -> None:
    path = folder / "generation_config.json"
    for text, what in (
        ("{broken", "is not readable JSON ("),
        ("[1]", "holds no settings; "),
        ("[" * 100_000, "is nested too deep"),
    ):
        path.write_text(text)
        assert f"{folder}: {path} {what}" in refusal(folder)
        assert (
            "download it again, or remove it, and the eos_token_id of config.json ends an answer"
            in refusal(folder)
        )
    path.unlink()
    assert load_adapter(str(folder), device="cpu").spec.eos_token_ids == (1,)


STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**5, 2**31, 2**63, 10**12, 10**30, -(10**12)]),
    st.floats(),
    st.sampled_from(
        [
            "",
            "1",
            "org/name",
            "silu",
            "nonsense",
            "full_attention",
            "float32",
            "load",
            "\x00",
            "é\ud800",
        ]
    ),
    st.lists(st.integers(-1, 5), max_size=3),
    st.just([[[]]]),
    st.dictionaries(st.sampled_from(["rope_type", "", "0", "x"]), st.integers(-1, 9)),
)


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[int, int, Any, bool]]:
    return draw(
        st.lists(
            st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), STRANGE, st.booleans()),
            min_size=1,
            max_size=3,
        )
    )


def mutated(config: dict[str, Any], changes: list[tuple[int, int, Any, bool]]) -> dict[str, Any]:
    """Values of other types and sizes, keys that are gone, at any depth."""
    config = copy.deepcopy(config)
    for place, which, value, drop in changes:
        inside = [config, *(v for v in config.values() if isinstance(v, dict) and v)]
        part = inside[place % len(inside)]
        key = sorted(part)[which % len(part)]
        if drop:
            del part[key]
        else:
            part[key] = value
        if not config:
            break
    return config


def check_any_config(
    saved: Path, folder: Path, family: str, changes: list[tuple[int, int, Any, bool]]
) -> None:
    config = json.loads((saved / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(mutated(config, changes)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec = load_adapter(str(folder), device="cpu").spec
    except SkipSearchError as error:
        told = str(error)
    else:
        told = str(spec)
    assert "\n" not in told
    assert len(told) < 1000


@pytest.fixture(scope="module")
def scratch(all_saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("mutated")
    return {family: copied(all_saved, place, family) for family in FAMILIES}


@with_examples(16)
@given(family=st.sampled_from(FAMILIES), changes=mutations())
def test_any_config_loads_or_is_refused_in_a_sentence(
    all_saved: Path,
    scratch: dict[str, Path],
    family: str,
    changes: list[tuple[int, int, Any, bool]],
) -> None:
    check_any_config(all_saved, scratch[family], family, changes)


@pytest.mark.slow
@with_examples(1000)
@given(family=st.sampled_from(FAMILIES), changes=mutations())
def test_any_of_many_configs_loads_or_is_refused_in_a_sentence(
    all_saved: Path,
    scratch: dict[str, Path],
    family: str,
    changes: list[tuple[int, int, Any, bool]],
) -> None:
    check_any_config(all_saved, scratch[family], family, changes)
