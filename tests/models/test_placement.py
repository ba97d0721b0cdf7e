"""Where a model goes, as what, and the sentence when it will not fit, asked before a weight is
read. GPUs here are pretended.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skipsearch.errors import ModelError
from skipsearch.models import load_adapter
from skipsearch.models.loading import placement
from skipsearch.models.loading.hub import DEMO_FOLDER
from skipsearch.models.loading.quantize import (
    QUANTIZATIONS,
    make_quantization_config,
    read_stored_quantization,
)
from skipsearch.models.loading.weight_files import (
    StoredTensor,
    list_stored_tensors,
    list_weight_files,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BIG = [
    StoredTensor("model.embed_tokens.weight", (32000, 4096), None),
    StoredTensor("model.layers.0.mlp.up_proj.weight", (1_600_000, 4096), None),
]


def pretend_gpus(
    monkeypatch: pytest.MonkeyPatch, *free_gb: float, capability: tuple[int, int] = (9, 0)
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free_gb))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_gb))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (int(free_gb[device.index] * 1e9), int(1e12))
    )


def chosen(
    device: str, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None
) -> placement.Placement:
    return placement.choose_placement(
        "big", BIG, placement.pick_device(device), dtype, quantization
    )


def refusal(
    device: str, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None
) -> str:
    with pytest.raises(ModelError) as caught:
        chosen(device, dtype, quantization)
    return str(caught.value)


def test_auto_is_the_gpu_if_there_is_one_and_its_fast_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch)
    assert placement.pick_device("auto") == torch.device("cpu")
    assert placement.pick_dtype("auto", torch.device("cpu")) == torch.float32
    pretend_gpus(monkeypatch, 80)
    assert placement.pick_device("auto") == torch.device("cuda")
    assert placement.pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    pretend_gpus(monkeypatch, 16, capability=(7, 5))
    assert placement.pick_dtype("auto", torch.device("cuda")) == torch.float16


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    with pytest.raises(ModelError) as caught:
        placement.pick_device("cuda:1")
    assert str(caught.value) == (
        "device cuda:1 was asked for and torch sees no GPU here; use --device cpu, or a CUDA build "
        "of torch"
    )
    pretend_gpus(monkeypatch, 80)
    with pytest.raises(ModelError) as caught:
        placement.pick_device("cuda:1")
    assert str(caught.value) == "there is no cuda:1: this machine has 1 GPU(s), counted from cuda:0"


def test_size_is_read_off_the_headers() -> None:
    tensors = list(list_stored_tensors(list_weight_files(DEMO_FOLDER, "demo")))
    on_disk = (DEMO_FOLDER / "model.safetensors").stat().st_size
    assert placement.compute_weight_bytes(tensors, torch.bfloat16, None) == pytest.approx(
        on_disk, rel=0.01
    )
    assert placement.compute_weight_bytes(
        tensors, torch.float32, None
    ) == 2 * placement.compute_weight_bytes(tensors, torch.bfloat16, None)
    packed = [
        StoredTensor("q", (10,), 4),
        StoredTensor("scale", (10,), None),
        StoredTensor("flags", (10,), 1),
    ]
    assert placement.compute_weight_bytes(packed, torch.float16, None) == 40 + 20 + 10


def test_the_gpu_with_most_room_is_taken_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, 20, 40)
    assert chosen("cuda") == placement.Placement(torch.device("cuda", 1))
    assert chosen("cuda:0") == placement.Placement(torch.device("cuda", 0))
    pretend_gpus(monkeypatch, 20)
    assert chosen("cuda") == placement.Placement(torch.device("cuda", 0))


def test_layers_go_over_all_gpus_where_one_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 8, 9)
    assert chosen("cuda") == placement.Placement(torch.device("cuda", 0), multi_gpu=True)
    assert "cuda:1 has 9.0 GB free" in refusal("cuda:1")


def test_what_does_not_fit_is_said_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_host_memory", lambda: int(20e9))
    pretend_gpus(monkeypatch)
    assert refusal("cpu", torch.float32) == (
        "big needs 26.7 GB for its weights as float32 and this machine has 20.0 GB free: --dtype "
        "bfloat16 needs 13.4 GB"
    )
    monkeypatch.setattr(placement, "available_host_memory", lambda: int(2e9))
    assert refusal("cpu", torch.float32) == (
        "big needs 26.7 GB for its weights as float32 and this machine has 2.0 GB free: use a "
        "larger machine or a smaller model"
    )
    pretend_gpus(monkeypatch, 5, 6)
    assert refusal("cuda") == (
        "big needs 13.4 GB for its weights as bfloat16 and 2 GPUs have 11.0 GB free together: "
        "--quantization bitsandbytes-4bit needs "
        "4.0 GB"
    )
    pretend_gpus(monkeypatch, 3)
    assert refusal("cuda", quantization="bitsandbytes-4bit") == (
        "big needs 4.0 GB for its weights as bitsandbytes-4bit and cuda:0 has 3.0 GB free: use a "
        "larger machine or a smaller model"
    )


def test_the_check_comes_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_host_memory", lambda: 1000)
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        lambda *_, **__: pytest.fail("was loaded"),
    )
    with pytest.raises(ModelError, match=r"demo needs 19 MB for its weights as bfloat16"):
        load_adapter("demo", device="cpu", dtype="bfloat16")


def test_host_memory_is_bounded_by_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    free = placement.available_host_memory()
    assert 0 < free < 1e15
    limits = {"memory.max": "5000\n", "memory.current": "2000\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: limits[self.name])
    assert placement.available_host_memory() == 3000
    limits["memory.max"] = "max\n"
    assert placement.available_host_memory() > 3000


def test_parts_left_on_the_cpu_are_refused() -> None:
    placement.reject_offload("big", {"": "cpu"})
    placement.reject_offload("big", {"model.embed_tokens": 0, "model.layers.0": 1})
    with pytest.raises(ModelError) as caught:
        placement.reject_offload(
            "big", {"model.embed_tokens": 0, "model.layers.0": "cpu", "lm_head": "disk"}
        )
    assert str(caught.value) == (
        "big does not fit on the GPUs: 2 of its parts (lm_head first) would stay on the CPU or on "
        "disk, which is refused, since timings "
        "would measure the bus; use a smaller dtype, a quantization or --device cpu"
    )


class Loading:
    """Stands in for transformers' loader: keeps what it was asked for, and reads the demo as
    plainly as this machine can.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device_map: dict[str, Any] | None = None):
        load = AutoModelForCausalLM.from_pretrained
        self.options: dict[str, Any] = {}

        def from_pretrained(folder: Path, **options: Any) -> Any:
            self.options = options
            model, report = load(
                folder,
                **{
                    k: v
                    for k, v in options.items()
                    if k not in {"device_map", "quantization_config"}
                },
            )
            model.hf_device_map = device_map
            return model, report

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)


def test_a_model_for_several_gpus_is_laid_out_by_accelerate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_small = 0.7e-9 * (DEMO_FOLDER / "model.safetensors").stat().st_size
    pretend_gpus(monkeypatch, too_small, too_small)
    loading = Loading(monkeypatch, {"model.embed_tokens": 0, "model.layers": 1})
    load_adapter("demo", device="cuda", dtype="bfloat16")
    assert loading.options["device_map"] == "auto"
    Loading(monkeypatch, {"model.embed_tokens": 0, "model.layers": "cpu"})
    with pytest.raises(
        ModelError, match=r"demo does not fit on the GPUs: 1 of its parts \(model.layers first\)"
    ):
        load_adapter("demo", device="cuda", dtype="bfloat16")


def test_a_quantization_is_handed_on_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipsearch.models.loading.quantize.find_spec", lambda library: library)
    loading = Loading(monkeypatch)
    spec = load_adapter(
        "demo", device="cpu", dtype="bfloat16", quantization="bitsandbytes-4bit"
    ).spec
    assert spec.quantization == "bitsandbytes-4bit"
    assert str(spec).endswith("layers) as bitsandbytes-4bit on cpu")
    assert loading.options["quantization_config"].load_in_4bit
    assert spec.config_sha256 == load_adapter("demo", device="cpu").spec.config_sha256


def test_what_the_weights_are_stored_with_is_left_to_their_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers takes a quantization_config of None for "none at all", and would read packed
    weights as plain ones.
    """
    loading = Loading(monkeypatch)
    load_adapter("demo", device="cpu")
    assert "quantization_config" not in loading.options


def test_a_library_that_stored_weights_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ImportError(
            "Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install "
            "bitsandbytes`"
        )

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", failing)
    with pytest.raises(ModelError) as caught:
        load_adapter("demo", device="cpu")
    assert str(caught.value) == (
        "demo needs a library that is not installed (Using `bitsandbytes` 4-bit quantization "
        "requires "
        "bitsandbytes: `pip install bitsandbytes`); install it"
    )


def test_what_is_stored_quantised_is_not_quantised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipsearch.models.loading.quantize.find_spec", lambda library: library)
    monkeypatch.setattr(
        "skipsearch.models.loading.loader.read_stored_quantization", lambda config: "gptq-4bit"
    )
    with pytest.raises(ModelError) as caught:
        load_adapter("demo", device="cpu", quantization="bitsandbytes-4bit")
    assert (
        str(caught.value)
        == "demo is stored as gptq-4bit and cannot be quantised again; leave quantization "
        "bitsandbytes-4bit out"
    )
    assert load_adapter("demo", device="cpu").spec.quantization == "gptq-4bit"


def test_a_quantization_by_another_name_or_without_its_library_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ModelError,
        match="there is no quantization called 'bitsandbytes-3bit'; did you mean bitsandbytes-",
    ):
        load_adapter("demo", device="cpu", quantization="bitsandbytes-3bit")
    monkeypatch.setattr("skipsearch.models.loading.quantize.find_spec", lambda library: None)
    for name, (library, _) in QUANTIZATIONS.items():
        with pytest.raises(ModelError) as caught:
            load_adapter("demo", device="cpu", quantization=name)
        assert str(caught.value) == (
            f"quantization {name} needs the library {library}, which is not installed: `pip "
            f"install {library}`, "
            "or load the model without quantization"
        )


def test_quantizations_are_transformers_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes need not be installed to be configured, torchao must: it is pretended."""
    monkeypatch.setattr("skipsearch.models.loading.quantize.find_spec", lambda library: library)
    eight = make_quantization_config("bitsandbytes-8bit", torch.bfloat16, CPU)
    four = make_quantization_config("bitsandbytes-4bit", torch.bfloat16, CPU)
    assert (eight.load_in_8bit, four.load_in_4bit, four.bnb_4bit_compute_dtype) == (
        True,
        True,
        torch.bfloat16,
    )
    assert [
        read_stored_quantization(SimpleNamespace(quantization_config=settings))
        for settings in (eight, four.to_dict())
    ] == ["bitsandbytes-8bit", "bitsandbytes-4bit"]

    torchao = ModuleType("torchao.quantization")
    torchao.Int8WeightOnlyConfig = lambda: "int8"  # type: ignore[attr-defined]
    torchao.Int4WeightOnlyConfig = lambda int4_packing_format: f"int4, {int4_packing_format}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", torchao)
    monkeypatch.setattr("transformers.TorchAoConfig", lambda kind: kind)
    assert [
        make_quantization_config(f"torchao-{bits}bit", torch.bfloat16, GPU) for bits in (8, 4)
    ] == ["int8", "int4, tile_packed_to_4d"]


@pytest.mark.parametrize(
    ("device", "dtype", "where"),
    [(CPU, torch.bfloat16, "cpu in bfloat16"), (GPU, torch.float16, "cuda in float16")],
)
def test_a_quantization_without_a_kernel_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, where: str
) -> None:
    monkeypatch.setattr("skipsearch.models.loading.quantize.find_spec", lambda library: library)
    with pytest.raises(ModelError) as caught:
        make_quantization_config("torchao-4bit", dtype, device)
    assert str(caught.value) == (
        f"quantization torchao-4bit runs on a GPU in bfloat16 only, and not on {where}: use "
        "bitsandbytes-4bit, or "
        "no quantization"
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4}, "gptq-4bit"),
        ({"quant_method": "awq", "bits": 4}, "awq-4bit"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes-4bit"),
    ],
)
def test_weights_that_are_stored_quantised_are_recorded_as_such(
    settings: dict[str, Any] | None, name: str | None
) -> None:
    assert read_stored_quantization(SimpleNamespace(quantization_config=settings)) == name


def test_a_library_that_fails_to_quantise_leaves_other_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this shape")

    monkeypatch.setattr("skipsearch.models.loading.quantize.find_spec", lambda library: library)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", failing)
    with pytest.raises(ModelError) as caught:
        load_adapter("demo", device="cpu", quantization="bitsandbytes-4bit")
    assert (
        str(caught.value)
        == "demo cannot be loaded (no kernel for this shape); try another quantization, or none"
    )


def test_only_matrices_of_layers_count_as_quantised() -> None:
    tensors = [
        StoredTensor("model.layers.0.self_attn.q_proj.weight", (100, 100), None),
        StoredTensor("model.norm.weight", (100,), None),
        StoredTensor("model.embed_tokens.weight", (100, 100), None),
        StoredTensor("lm_head.weight", (100, 100), None),
    ]
    assert (
        placement.compute_weight_bytes(tensors, torch.float16, "bitsandbytes-8bit")
        == 10_000 + 200 + 20_000 + 20_000
    )
