"""The compiled engine: what it compiles, where it keeps it, and what it says when it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skipsearch.cache import Planner
from skipsearch.decoding import Decoder
from skipsearch.engine import compiled, forward, load_model
from skipsearch.engine.kept import DIGEST, private_folder
from skipsearch.engine.opaque import stand_in, weights_are_arguments
from skipsearch.engine.pieces import RowSums, rebuilt, weights_of
from skipsearch.errors import ModelError
from skipsearch.exits import make_exit
from skipsearch.machine import cache_folder
from skipsearch.mask import SkipMask
from skipsearch.models.linear import Packed, Plain

NAME, MASK = "synthetic:3x64", SkipMask(3, (1,), (2,))
pytestmark = pytest.mark.xdist_group("compiled")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield cache_folder()


def open_it(progress: list[tuple[int, int]] | None = None, dtype: str = "bfloat16") -> compiled.CompiledAdapter:
    listen = (lambda done, total: progress.append((done, total))) if progress is not None else (lambda done, total: None)
    model = load_model(NAME, device="cpu", dtype=dtype, engine="compiled", progress=listen)
    assert isinstance(model, compiled.CompiledAdapter)
    return model


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> compiled.CompiledAdapter:
    """In float32. Passes over all of a model run its layers and its head, so the pieces that only drafts run are left out."""
    real = compiled._compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path_factory.mktemp("wide")))
        patch.setattr(compiled, "_compiled", lambda name, *more: real(name, *more) if name.startswith(("layer-", "head-")) else never)
        return open_it(dtype="float32")


def never(*arguments: object) -> None:
    raise AssertionError("compiled again")


def test_in_bfloat16_exact_drafting_changes_no_token(cache: Path) -> None:
    model = open_it()
    assert model.spec.engine == "compiled"
    plain = Decoder(model, exact=True).generate([5, 17, 40], 40)
    drafted = Decoder(model, MASK, draft_length=4, exit_policy=make_exit("fixed"), exact=True).generate([5, 17, 40], 40)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0


def test_the_headers_that_it_was_compiled_with_are_this_processs_own(cache: Path) -> None:
    open_it()
    assert list(private_folder("headers").glob("*.gch"))


def test_what_is_compiled_once_is_loaded_the_next_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_it()
    files = {path: path.stat().st_mtime_ns for path in (cache / "compiled").glob("*.code")}
    assert set((cache / "compiled").iterdir()) == set(files), "nothing half made is left"
    assert len(files) == 8, "attention, MLP, both and head, for one row and for several, whatever the number of layers"
    monkeypatch.setattr(compiled, "_compile", never)
    progress: list[tuple[int, int]] = []
    open_it(progress)
    assert {path: path.stat().st_mtime_ns for path in (cache / "compiled").glob("*.code")} == files
    assert progress[-1] == (8, 8)


def test_another_dtype_is_compiled_under_another_name_and_code_that_does_not_load_is_not_kept(cache: Path,
                                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    open_it()
    kept = {path: path.read_bytes() for path in (cache / "compiled").iterdir()}
    asked: list[int] = []
    monkeypatch.setattr(compiled, "_compile", lambda piece, rows: asked.append(rows) or b"not a package")
    with pytest.raises(ModelError, match=r"could not be loaded .* the temporary folder may be full or not writable: set TMPDIR"):
        open_it(dtype="float16")
    assert asked == [1]
    assert {path: path.read_bytes() for path in (cache / "compiled").iterdir()} == kept


def test_a_full_temporary_folder_costs_no_compiled_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading unpacks there, and fails in torch with a RuntimeError."""
    open_it()
    kept = {path: path.read_bytes() for path in (cache / "compiled").iterdir()}

    def full(*arguments: object) -> None:
        raise RuntimeError("Failed to extract zip file x.so: write callback failed\nand where")

    with monkeypatch.context() as patch:
        patch.setattr(torch._C._aoti, "AOTIModelPackageLoader", full)
        with pytest.raises(ModelError, match=r"write callback failed\); the temporary folder .*set TMPDIR.* if there is room, remove "
                                             r".*\.code") as caught:
            open_it()
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in (cache / "compiled").iterdir()} == kept
    monkeypatch.setattr(compiled, "_compile", never)
    open_it()


def test_damaged_code_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_it()
    path = min((cache / "compiled").iterdir())
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        monkeypatch.setattr(compiled, "_compile", lambda piece, rows: whole[DIGEST:])
        open_it()
        assert path.read_bytes() == whole
    finally:
        path.write_bytes(whole)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def broken(*arguments: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_compile", broken)
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler that works .*: install g\+\+, or use --engine lean"):
        open_it()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be kept in .*set SKIPSEARCH_CACHE_DIR to a folder with room"):
        open_it()


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SKIPSEARCH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "skipsearch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~")) / ".cache" / "skipsearch"


def test_a_long_prefill_and_a_batch_run_uncompiled() -> None:
    model = open_it()
    prompt = [i * 11 % 4000 for i in range(100)]
    lean = Decoder(model.lean).generate(prompt, 6)
    assert len(Decoder(model).generate(prompt, 6).tokens) == len(lean.tokens) == 6
    rows = torch.zeros(2, 3, dtype=torch.long)
    with torch.no_grad():
        logits = forward(model, rows, model.new_cache(2, 16), Planner(16, torch.device("cpu")).chain(0, 3, 2))
    assert logits.shape == (2, 3, model.spec.vocab)


def test_row_sums_are_the_product() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x, h = (torch.randn(*shape, generator=generator) for shape in ((24, 16), (24,), (1, 16), (1, 24)))
    for b in (None, bias):
        torch.testing.assert_close(RowSums(weight, b)(x), Plain(weight, b)(x))
        torch.testing.assert_close(RowSums(weight, b).added(h, x), Plain(weight, b).added(h, x))
        assert RowSums(weight, b).bytes == weight.nbytes


def test_a_sub_layer_rebuilt_from_its_own_weights_is_itself() -> None:
    model = load_model(NAME, device="cpu", dtype="float32", engine="lean")
    for part in model.layers[0]:  # type: ignore[attr-defined]
        assert rebuilt(part, weights_of(part), one_row=False) == part


def test_code_is_made_of_a_matrix_as_stored_and_runs_with_one_in_blocks(wide: compiled.CompiledAdapter) -> None:
    matrix = wide.lean.layers[0][1].down
    if not isinstance(matrix, Packed):
        pytest.skip("oneDNN is not there, so nothing is packed")
    assert matrix.weight.is_mkldnn
    made = stand_in(matrix.weight)
    assert (made.shape, made.dtype, made.is_mkldnn) == (matrix.weight.shape, matrix.weight.dtype, False)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_its_passes_compute_what_lean_computes(wide: compiled.CompiledAdapter, rows: int) -> None:
    tokens = torch.arange(30)[None]
    logits = []
    for adapter in (wide, wide.lean):
        cache, planner = adapter.new_cache(1, 64), Planner(64, torch.device("cpu"))
        with torch.inference_mode():
            forward(wide.lean, tokens, cache, planner.chain(0, 30))
            logits.append(forward(adapter, tokens[:, :rows], cache, planner.chain(30, rows)))
    torch.testing.assert_close(*logits)
    assert not torch.equal(logits[0], torch.zeros_like(logits[0]))


def test_what_the_compiler_is_told_is_told_for_our_code_alone() -> None:
    from torch._inductor.lowering import lowerings

    op = torch.ops.mkldnn._linear_pointwise.default
    open_it()
    before = lowerings[op]
    with weights_are_arguments():
        assert lowerings[op] is not before
    assert lowerings[op] is before
