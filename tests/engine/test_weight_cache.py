"""Packed weights that are stored for later loads: a stored model is the fresh one to the last bit,
and whatever happens to the file, the tokens are right.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import limit_file_size
from helpers.gguf_files import write_model
from helpers.threads import one_thread
from models.test_gguf import MODELS, PROMPT, logits_of, make_model

import skipsearch as ss
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import load
from skipsearch.engine.native import WeightCache, weight_cache
from skipsearch.engine.native.panels import PanelLinear
from skipsearch.errors import UnpackedWeightsWarning
from skipsearch.models.fused.fused_adapter import list_matrices
from skipsearch.models.fused.unfused_layer import unfuse_last_layer
from skipsearch.models.kv_cache import Planner

__all__ = ["one_thread"]
pytestmark = pytest.mark.xdist_group("native")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightCache:
    """A cache of its own, which takes small models, too."""
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    cache = WeightCache()
    cache.folder = tmp_path / "weights"
    return cache


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_model(make_model("llama"), tmp_path / "model.gguf", "Q8_0")
    return tmp_path / "model.gguf"


def load_fresh(path: Path, **options: Any) -> Any:
    return ss.load_model(str(path), device="cpu", **{"dtype": "float32", **options})


def load_stored(path: Path, cache: WeightCache, **options: Any) -> Any:
    """Load a model whose file is not opened as a model again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "open_gguf", lambda name, dtype: pytest.fail("it is not stored"))
        return load_fresh(path, weight_cache=cache, **options)


def is_stored(path: Path, cache: WeightCache, **options: Any) -> bool:
    try:
        load_stored(path, cache, **options)
    except pytest.fail.Exception:
        return False
    return True


def matrices_of(model: Any) -> list[PanelLinear]:
    fused = model.fused_model
    matrices = [matrix for layer in fused.layers for matrix in list_matrices(layer)]
    for _, mlp in fused.layers:
        matrices += [] if mlp.routing is None else [mlp.routing.router]
        matrices += [] if mlp.shared is None else [mlp.shared.gate]
    return [*matrices, fused.unembed, fused._embedding.matrix]


def check_equal(stored: Any, fresh: Any) -> None:
    """Check that two models have equal bytes, logits, and texts, plain and drafted."""
    assert stored.spec == fresh.spec
    for one, other in zip(matrices_of(stored), matrices_of(fresh), strict=True):
        assert torch.equal(one.weight, other.weight)
        assert (one.kinds, one.shape, one.interleave) == (
            other.kinds,
            other.shape,
            other.interleave,
        )
        assert (one.bias is None) == (other.bias is None)
    assert torch.equal(logits_of(stored, PROMPT), logits_of(fresh, PROMPT))
    mask = SkipMask(fresh.spec.n_layers, attn=(1,), mlp=(0,))
    texts = {
        tuple(decoder.generate(PROMPT, 24, ignore_eos=True).tokens)
        for model in (stored, fresh)
        for decoder in (
            Decoder(model),
            Decoder(model, mask, draft_length=3, exit_policy=make_exit("fixed")),
        )
    }
    assert len(texts) == 1


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_is_stored_to_the_last_bit(
    name: str, cache: WeightCache, tmp_path: Path
) -> None:
    write_model(make_model(name), tmp_path / "m.gguf", "Q8_0")
    fresh = load_fresh(tmp_path / "m.gguf")
    check_equal(load_fresh(tmp_path / "m.gguf", weight_cache=cache), fresh)
    check_equal(load_stored(tmp_path / "m.gguf", cache), fresh)


@pytest.mark.parametrize("activations", ["int8", "int16", "float"])
def test_an_entry_serves_every_rounding_of_activations_that_was_checked(
    activations: str, cache: WeightCache, file: Path
) -> None:
    load_fresh(file, weight_cache=cache)
    fresh = load_fresh(file, activations=activations)
    check_equal(load_stored(file, cache, activations=activations), fresh)
    assert len(cache.list_entries()) == 1


def test_a_split_file_is_stored(cache: WeightCache, tmp_path: Path) -> None:
    write_model(make_model("llama"), tmp_path / "m.gguf", "Q8_0", shards=7)
    first = min(tmp_path.glob("m-00001-of-*.gguf"))
    load_fresh(first, weight_cache=cache)
    check_equal(load_stored(first, cache), load_fresh(first))


def test_a_load_that_was_not_checked_is_checked(
    cache: WeightCache, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fresh(file, weight_cache=cache)
    assert is_stored(file, cache)
    monkeypatch.setattr(weight_cache, "load_check_result", lambda spec, compiled: None)
    assert not is_stored(file, cache)


def test_another_file_or_dtype_is_not_the_stored_model(
    cache: WeightCache, file: Path, tmp_path: Path
) -> None:
    load_fresh(file, weight_cache=cache)
    status = file.stat()
    other = make_model("llama")
    other.model.norm.weight.mul_(2)
    write_model(other, file, "Q8_0")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, is_stored(file, cache)) == (status.st_size, False)
    load_fresh(file, weight_cache=cache)
    assert is_stored(file, cache)
    assert not is_stored(file, cache, dtype="bfloat16")
    load_fresh(file, dtype="bfloat16", weight_cache=cache)
    assert is_stored(file, cache, dtype="bfloat16")
    assert is_stored(file, cache)


def test_what_other_code_stored_of_a_file_is_replaced(
    cache: WeightCache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fresh(file, weight_cache=cache)
    (before,) = cache.list_entries()
    monkeypatch.setattr(weight_cache, "hash_own_code", lambda: "newer code")
    assert not is_stored(file, cache)
    load_fresh(file, weight_cache=cache)
    (after,) = cache.list_entries()
    assert after.path != before.path
    assert is_stored(file, cache)


def flip(place: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        i = place(len(data))
        return data[:i] + bytes([data[i] ^ 16]) + data[i + 1 :]

    return damage


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "magic": flip(lambda n: 0),
    "length": flip(lambda n: 9),
    "checksum": flip(lambda n: 33),
    "structure": flip(lambda n: 300),
    "tensors": flip(lambda n: n // 2),
    "last byte": flip(lambda n: n - 65),
    "cut short": lambda data: data[: len(data) // 2],
    "zeros at the end": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "longer": lambda data: data + bytes(64),
    "a few bytes": lambda data: data[:7],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_packed_again(damage: str, cache: WeightCache, file: Path) -> None:
    fresh = load_fresh(file, weight_cache=cache)
    (entry,) = cache.list_entries()
    entry.path.write_bytes(DAMAGE[damage](entry.path.read_bytes()))
    assert not is_stored(file, cache)
    check_equal(load_fresh(file, weight_cache=cache), fresh)
    check_equal(load_stored(file, cache), fresh)


def test_no_code_of_an_entry_runs(cache: WeightCache, file: Path, tmp_path: Path) -> None:
    fresh = load_fresh(file, weight_cache=cache)
    (entry,) = cache.list_entries()

    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "planted"),)

    structure = pickle.dumps(Planted())
    start = weight_cache.PREAMBLE.size + len(structure)
    preamble = weight_cache.PREAMBLE.pack(
        weight_cache.MAGIC, start, len(structure), zlib.crc32(structure), 0
    )
    entry.path.write_bytes(preamble + structure)
    check_equal(load_fresh(file, weight_cache=cache), fresh)
    assert not (tmp_path / "planted").exists()
    assert is_stored(file, cache)


def run_in_child(action: Callable[[], Any]) -> int:
    """Run an action in a copy of this process; return its exit status."""
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(
    cache: WeightCache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_fresh(file)

    def die(*arguments: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache.zlib, "crc32", die)
        assert run_in_child(lambda: cache.store(model, [])) == signal.SIGKILL
    (left,) = cache.folder.iterdir()
    assert cache.list_entries() == []
    check_equal(load_fresh(file, weight_cache=cache), model)
    assert left.exists()  # its process may still write
    long_ago = time.time() - 2 * weight_cache.ABANDONED_S
    os.utime(left, (long_ago, long_ago))
    check_equal(load_stored(file, cache), model)
    assert not left.exists()


def test_processes_that_store_at_once_store_one_entry(cache: WeightCache, file: Path) -> None:
    model = load_fresh(file)
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                for _ in range(5):
                    cache.store(model, [])
                    is_right = torch.equal(
                        logits_of(load_stored(file, cache), PROMPT), logits_of(model, PROMPT)
                    )
                    assert is_right
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert len(list(cache.folder.iterdir())) == 1
    check_equal(load_stored(file, cache), model)


def test_a_full_disk_is_announced_and_leaves_nothing(cache: WeightCache, file: Path) -> None:
    sentences: list[str] = []
    cache.announce = sentences.append
    with limit_file_size(20_000):
        model = load_fresh(file, weight_cache=cache)
    check_equal(model, load_fresh(file))
    assert (sentences[1].count("are not stored"), list(cache.folder.iterdir())) == (1, [])


def test_entries_that_were_used_longest_ago_make_room_on_a_short_disk(
    cache: WeightCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for i, name in enumerate(("llama", "qwen3", "gemma")):
        files.append(tmp_path / f"{name}.gguf")
        write_model(make_model(name), files[-1], "Q8_0")
        load_fresh(files[-1], weight_cache=cache)
        for entry in cache.list_entries():
            if entry.model == name:
                os.utime(entry.path, (i + 1, i + 1))
    load_stored(files[0], cache)  # so the second one is the oldest
    sizes = {entry.model: entry.n_bytes for entry in cache.list_entries()}

    def usage(folder: Path) -> Any:
        used = sum(entry.n_bytes for entry in cache.list_entries())
        free = weight_cache.SPARE_BYTES + sum(sizes.values()) - used
        return shutil._ntuple_diskusage(0, 0, free)  # type: ignore[attr-defined]

    monkeypatch.setattr(weight_cache.shutil, "disk_usage", usage)
    write_model(make_model("qwen3"), tmp_path / "new.gguf", "Q8_0")
    load_fresh(tmp_path / "new.gguf", weight_cache=cache)
    assert {entry.model for entry in cache.list_entries()} == {"llama", "gemma", "new"}
    assert is_stored(tmp_path / "new.gguf", cache)
    cache.remove_all()
    sentences: list[str] = []
    cache.announce = sentences.append
    sizes.clear()
    load_fresh(files[0], weight_cache=cache)
    assert cache.list_entries() == []
    assert "0.00 GB stay free" not in sentences[0]
    assert "GB are free" in sentences[0]


def test_a_folder_that_others_may_write_to_is_not_used(cache: WeightCache, file: Path) -> None:
    load_fresh(file, weight_cache=cache)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    (entry,) = cache.list_entries()
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    cache.folder.chmod(0o777)
    assert not is_stored(file, cache)


def test_a_small_model_and_one_without_a_file_are_not_stored(
    cache: WeightCache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1 << 30)
    load_fresh(file, weight_cache=cache)
    assert not cache.folder.exists()


def test_warnings_of_a_file_are_repeated(cache: WeightCache, tmp_path: Path) -> None:
    write_model(make_model("llama"), tmp_path / "m.gguf", "F16")
    notes = []
    path = tmp_path / "m.gguf"
    for load_once in (
        lambda: load_fresh(path, weight_cache=cache),
        lambda: load_stored(path, cache),
    ):
        with pytest.warns(UnpackedWeightsWarning) as caught:
            load_once()
        notes.append([str(note.message) for note in caught])
    assert notes[0] == notes[1]


def test_a_draft_head_begins_with_the_last_layer_of_a_stored_model(
    cache: WeightCache, file: Path
) -> None:
    fresh = load_fresh(file, weight_cache=cache)
    stored = load_stored(file, cache)
    tokens = torch.arange(5)
    layers = [unfuse_last_layer(model.fused_model, tokens) for model in (fresh, stored)]
    hidden = torch.randn(1, 3, fresh.spec.hidden_size)
    outputs = []
    for layer in layers:
        plan = Planner(8, torch.device("cpu")).plan_chain(0, 3)
        outputs.append(layer.head(layer.block(0, hidden, layer.new_cache(1, 8), plan)))
    assert torch.equal(*outputs)


WITHOUT_TRANSFORMERS = """
import sys
import skipsearch as ss
from pathlib import Path
from tokenizers import Tokenizer, models
from skipsearch.decoding import Decoder
from skipsearch.engine.native import WeightCache
from skipsearch.models.chat.chat_text import encode_text
from skipsearch.models.loading.stored_tokenizer import StoredTokenizer, TokenizerParts
cache = WeightCache()
cache.folder = Path(sys.argv[2])
model = ss.load_model(sys.argv[1], dtype="float32", weight_cache=cache)
backend = Tokenizer(models.BPE({"a": 3, "b": 9, "ab": 4}, [("a", "b")]))
model.tokenizer = StoredTokenizer(TokenizerParts("m", backend.to_str(), {}))
tokens = Decoder(model).generate(encode_text(model.tokenizer, "aba", True), 8, ignore_eos=True)
print(tokens.tokens, tokens.text is not None, "transformers" in sys.modules)
"""


def test_a_stored_model_decodes_without_transformers(cache: WeightCache, file: Path) -> None:
    """Its import takes a second."""
    model = load_fresh(file, weight_cache=cache)
    tokens = Decoder(model).generate([4, 3], 8, ignore_eos=True).tokens
    printed = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(file), str(cache.folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    ).stdout
    assert printed.split(" True ") == [str(tokens), "False\n"]
