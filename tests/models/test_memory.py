"""Out of memory while a model is loaded is reported as that, with the size that was needed and a
way out, whatever a library calls it.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import transformers
from helpers.marks import in_turn, thorough

import skipsearch as ss
from skipsearch.engine import native
from skipsearch.errors import ModelError
from skipsearch.models import load_adapter, memory
from skipsearch.models.loading import loader, placement

WORDS = {
    "torch on a CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried "
        "to …"
    ),
    "torch mapping a file": RuntimeError(
        "unable to mmap 99 bytes from file <model.safetensors>: Cannot allocate memory (12)"
    ),
    "torch on a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "Python": MemoryError(),
    "the system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "the linker": ImportError("libscipy_openblas.so: failed to map segment from shared object"),
}
STAGES: dict[str, tuple[Any, str]] = {
    "the weights": (transformers.AutoModelForCausalLM, "from_pretrained"),
    "the tokenizer": (transformers.AutoTokenizer, "from_pretrained"),
    "the model's own forward": (loader, "record_reference"),
    "fused weights": (loader, "fuse_model"),
}


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def refusal(**settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_adapter("demo", device="cpu", **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def nothing_checked_yet(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("words", "stage"), in_turn(WORDS, list(STAGES)))
def test_the_size_and_a_way_out_are_named_and_no_file_is_blamed(
    words: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*STAGES[stage], raising(WORDS[words]))
    said = refusal(dtype="float32")
    assert "ran out of memory" in said
    assert "needs 39 MB for its weights as float32" in said
    assert "--dtype bfloat16 needs" in said
    assert "download" not in said


def test_before_the_weights_are_known_no_size_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_config", raising(MemoryError()))
    assert "ran out of memory before its weights were read" in refusal()


def test_an_error_that_says_nothing_is_about_memory_if_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `unknown parameter type`, in which a failed allocation within torch may end."""
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        raising(RuntimeError("unknown parameter type")),
    )
    assert "cannot be loaded (unknown parameter type)" in refusal()
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    assert "ran out of memory" in refusal()


def test_our_own_errors_pass_even_if_no_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(ModelError, match="there is no model called"):
        load_adapter("nosuchmodel")
    monkeypatch.setattr(
        loader, "check_special_tokens", raising(ModelError("its tokens are strange"))
    )
    assert refusal() == "its tokens are strange"


def test_native_names_what_it_lays_out_and_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native.repack, "HugePageArena", raising(OSError(errno.ENOMEM, "Cannot allocate memory"))
    )
    monkeypatch.setattr(
        native, "load_or_build", lambda progress: SimpleNamespace(sha256="a" * 64)
    )  # which nothing calls
    with pytest.raises(
        ModelError,
        match=r"ran out of memory while the engine native repacked its weights of 39 MB,.*"
        r"--engine lean",
    ):
        ss.load_model("demo", device="cpu", engine="native")


def test_a_limit_of_the_address_space_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (used + 50_000_000, resource.RLIM_INFINITY)
    )
    assert placement.available_host_memory() == pytest.approx(50_000_000, abs=20_000_000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1000, resource.RLIM_INFINITY))
    assert placement.available_host_memory() == 0
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert placement.available_host_memory() > 0


@pytest.mark.parametrize("spare_mb", [20, *thorough(45)])
def test_a_process_that_may_take_no_more_says_so(spare_mb: int) -> None:
    """A first load imports what is needed. The second may take less than the weights, or than the
    weights and their file.
    """
    code = f"""
import psutil, resource, torch
import skipsearch as ss
torch.set_num_threads(1)
first = ss.load_model("demo", device="cpu", dtype="bfloat16", engine="lean")
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + {spare_mb} * 10**6,) * 2)
try:
    ss.load_model("demo", device="cpu", dtype="float32", engine="lean")
except ss.errors.ModelError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "needs 39 MB for its weights as float32" in ran.stdout
    assert "download" not in ran.stdout
