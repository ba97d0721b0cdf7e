"""The native engine: passes, to the bit where that is promised; building and its errors."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decoding.checks import MASKS, Drafting, check_greedy
from helpers.tiny import use_engine
from models import test_contract
from models.tiny import FUSED_FAMILIES, full_logits, new_hf_model, some_tokens
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Siblings
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import draft_step, forward, forward_exact, no_grad
from skipsearch.engine.engines import wrap_engine
from skipsearch.engine.forward import run_layer_loop
from skipsearch.engine.native import NativeAdapter, cached_library, repack, to_native
from skipsearch.engine.native import build as building
from skipsearch.engine.native.panels import PanelLinear, PanelPacker
from skipsearch.engine.sampler import GreedySampler
from skipsearch.errors import EngineFallbackWarning, ModelError
from skipsearch.models import ModelAdapter, adapt, load_adapter
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import FusedAdapter, fuse_model
from skipsearch.models.fused.mlp import GatedActivation
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

pytestmark = pytest.mark.xdist_group("native")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
CPU = torch.device("cpu")


def fused(name: str, dtype: torch.dtype = torch.float64) -> FusedAdapter:
    model = new_hf_model(name).to(dtype)
    return fuse_model(model, replace(adapt(model).spec, engine="lean"), family_of(model.config))


@cache
def native(name: str, dtype: torch.dtype = torch.float64) -> NativeAdapter:
    native_model = to_native(fused(name, dtype))
    assert isinstance(native_model, NativeAdapter)
    return native_model


# --- the model

CONTRACT = {
    name: check
    for name, check in vars(test_contract).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["name"]
}


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", FUSED_FAMILIES)
def test_it_keeps_the_contract_of_every_family_layer_by_layer(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_contract, "adapted", native)
    CONTRACT[check](name)


@no_grad
def passes(model: ModelAdapter, run: Callable[..., Tensor] = forward) -> list[Tensor]:
    """Logits of a prefill in several pieces, a long one among them, of drafts, of a tree, and of
    rows that each see a part.
    """
    tokens, planner = some_tokens(64), Planner(64, CPU)
    cache, n = model.new_cache(1, 64), model.spec.n_layers
    logits = [
        run(model, tokens[:, a:b], cache, planner.plan_chain(a, b - a))
        for a, b in itertools.pairwise((0, 20, 21, 24, 41))
    ]
    logits += [
        run(model, tokens[:, 41:42], cache, planner.plan_chain(41, 1), mask)
        for mask in (
            SkipMask(n, (1,), (0,)),
            SkipMask(n, (0, 2)),
            SkipMask.from_layers(n, range(n)),
        )
    ]
    logits.append(run(model, tokens[:, 41:47], cache, planner.plan_tree(41, [0, 0, 1, 2, 4])))
    positions = torch.tensor([[9, 10, 30, 31, 32]])
    logits.append(
        run(
            model,
            tokens[:, 41:46],
            cache,
            planner.plan_replay(
                41,
                positions,
                positions - torch.tensor([0, 1, 0, 1, 2]),
                torch.tensor([0, 0, 1, 1, 1]),
            ),
        )
    )
    return [
        *logits,
        run(
            model, tokens[:, :30], model.new_cache(1, 64), planner.plan_chain(0, 30), last_only=True
        ),
    ]


@pytest.mark.parametrize("name", FUSED_FAMILIES)
def test_whole_passes_are_those_of_lean(name: str) -> None:
    # Routers compute probabilities in float32.
    bound = 1e-9 if fused(name).experts is None else 1e-5
    for mine, theirs in zip(passes(native(name)), passes(fused(name)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2", "qwen3_moe"])
def test_a_whole_pass_is_its_layers_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """So it makes no difference who looks at hidden states."""
    model = native(name, dtype)
    for whole, layers in zip(passes(model), passes(model, run_layer_loop), strict=True):
        assert torch.equal(whole, layers)


@no_grad
def test_rows_of_several_texts_are_those_of_each_alone() -> None:
    """Decoded together after prompts of different lengths, as a batch is."""
    model = native("qwen2")
    tokens, lengths = some_tokens(40).view(2, 20), torch.tensor([[12], [17]])
    cache, planner = model.new_cache(2, 32), Planner(32, CPU)
    prefill = forward(model, tokens, cache, planner.plan_chain(0, 20, 2))
    visible = (torch.arange(20) <= lengths[:, :, None])[:, None]
    step = forward(
        model, tokens.gather(1, lengths), cache, PassPlan(lengths, lengths, 20, visible, None)
    )
    for row, length in enumerate(lengths[:, 0].tolist()):
        alone = full_logits("qwen2", tokens[row : row + 1, : length + 1])
        torch.testing.assert_close(prefill[row, : length + 1], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(step[row, 0], alone[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("confidence", [True, False])
@no_grad
def test_a_greedy_draft_step_names_the_token_and_its_probability(
    dtype: torch.dtype, confidence: bool
) -> None:
    """In bfloat16 several logits are often equal; the first of them counts."""
    model, sampler = native("llama", dtype), GreedySampler()
    cache, planner, mask = model.new_cache(1, 64), Planner(64, CPU), SkipMask(3, (1,), (2,))
    for at, token in enumerate(some_tokens(64)[0].tolist()):
        mine = draft_step(
            model,
            torch.tensor([[token]]),
            cache,
            planner.plan_chain(at, 1),
            mask,
            sampler,
            confidence,
        )
        theirs = sampler.score(
            forward(model, torch.tensor([[token]]), cache, planner.plan_chain(at, 1), mask)[:, -1],
            confidence,
        )
        assert torch.equal(mine.choice, theirs.choice)
        assert mine.probs is None
        if confidence:
            torch.testing.assert_close(
                mine.confidence, theirs.confidence.float(), rtol=1e-4, atol=1e-5
            )
        else:
            assert mine.confidence is None


@pytest.mark.parametrize("tokens", [[[-1]], [[10**6]]])
def test_what_would_lead_outside_of_memory_is_refused(tokens: list[list[int]]) -> None:
    model = native("llama")
    cache, plan = model.new_cache(1, 8), Planner(8, CPU).plan_chain(0, 1)
    with pytest.raises(IndexError, match="out of range"):
        forward(model, torch.tensor(tokens), cache, plan)
    with pytest.raises(IndexError, match="out of range"):
        forward(
            model,
            torch.tensor([[1]]),
            cache,
            PassPlan(plan.positions + 99, plan.slots, 1, None, None),
        )
    with pytest.raises(IndexError, match="out of range"):
        forward(
            model,
            torch.tensor([[1]]),
            cache,
            PassPlan(plan.positions, plan.slots + 8, 1, None, None),
        )


# --- bugs that the suites of decoding would find, planted into what the native engine does itself


@contextmanager
def stale_kv_at_accepted_positions() -> Iterator[None]:
    """A verify pass leaves what the draft wrote."""
    real = NativeAdapter.run

    def run(
        self: NativeAdapter,
        tokens: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | None,
        last_only: bool,
    ) -> Tensor:
        slots = plan.slots[0, :-1]
        is_verify = mask is None and len(slots) > 0 and int(slots[0]) > 0
        before = [
            (buffer, buffer[:, :, slots].clone())
            for buffer in (*cache.keys, *cache.values)
            if buffer is not None and is_verify
        ]
        logits = real(self, tokens, cache, plan, mask, last_only)
        for buffer, old in before:
            if bool(old.any()):
                buffer[:, :, slots] = old
        return logits

    with patch.object(NativeAdapter, "run", run):
        yield


@contextmanager
def full_model_kv_missing() -> Iterator[None]:
    """A verify pass leaves no K/V in the layers that the draft skips."""
    real = NativeAdapter.run

    def run(
        self: NativeAdapter,
        tokens: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | None,
        last_only: bool,
    ) -> Tensor:
        logits = real(self, tokens, cache, plan, mask, last_only)
        if tokens.shape[1] > 1 and int(plan.slots[0, 0]) > 0:
            for layer in MASKS[0].attn:
                for buffer in (cache.keys[layer], cache.values[layer]):
                    assert buffer is not None
                    buffer[:, :, plan.slots[0]] = 0
        return logits

    with patch.object(NativeAdapter, "run", run):
        yield


@contextmanager
def siblings_that_see_each_other() -> Iterator[None]:
    real = NativeAdapter.build_pass_args

    def blind(
        self: NativeAdapter, given: Tensor, cache: KVCache, plan: PassPlan, *rest: Any
    ) -> Any:
        return real(self, given, cache, replace(plan, mask=None), *rest)

    with patch.object(NativeAdapter, "build_pass_args", blind):
        yield


@contextmanager
def masks_that_are_mixed_up() -> Iterator[None]:
    """The full model leaves out what the last draft did."""
    real, last = NativeAdapter.run_draft_chain, list[SkipMask]()

    def run_draft(
        self: NativeAdapter,
        token: Tensor,
        cache: KVCache,
        planner: Planner,
        mask: SkipMask,
        *rest: Any,
    ) -> Any:
        last[:] = [mask]
        return real(self, token, cache, planner, mask, *rest)

    skip = NativeAdapter._skip_bytes
    with (
        patch.object(NativeAdapter, "run_draft_chain", run_draft),
        patch.object(
            NativeAdapter,
            "_skip_bytes",
            lambda self, skipped: skip(self, last[0] if skipped is None and last else skipped),
        ),
    ):
        yield


@pytest.mark.parametrize("engine", ["native", "native-8bit-float-activations"])
@pytest.mark.parametrize(
    "bug",
    [
        stale_kv_at_accepted_positions,
        full_model_kv_missing,
        siblings_that_see_each_other,
        masks_that_are_mixed_up,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_check_fails_while_the_bug_is_planted(
    bug: Callable[[], AbstractContextManager[None]], engine: str
) -> None:
    drafting = (
        Drafting(MASKS[0], 5, siblings=Siblings(below=1.0, most=2))
        if bug is siblings_that_see_each_other
        else Drafting()
    )
    with use_engine(engine):
        check_greedy([drafting])
        with bug(), pytest.raises(AssertionError):
            check_greedy([drafting])


# --- one order of sums


@cache
def demo(dtype: str) -> NativeAdapter:
    native_model = wrap_engine(
        load_adapter("demo", device="cpu", dtype=dtype, engine="lean"), "native"
    )
    assert isinstance(native_model, NativeAdapter)
    return native_model


@no_grad
def logits_of(model: ModelAdapter, tokens: Tensor, cuts: list[int]) -> Tensor:
    """[T, V] of the same text, fed in pieces of these sizes."""
    cache, planner = model.new_cache(1, 600), Planner(600, CPU)
    ends = list(itertools.accumulate(cuts))
    assert ends[-1] == tokens.shape[1]
    return torch.cat(
        [
            forward_exact(model, tokens[:, end - size : end], cache, planner, end - size)[0]
            for end, size in zip(ends, cuts, strict=True)
        ]
    )


@pytest.fixture
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_row_has_the_same_bits_in_any_pass_and_by_any_number_of_threads(
    dtype: str, threads: Callable[[int], None]
) -> None:
    """Across the borders of blocks of 256 keys, which threads share where the rows are few."""
    model, tokens = demo(dtype), (torch.arange(530)[None] * 37 + 11) % 4000 + 4
    threads(1)
    whole = logits_of(model, tokens, [530])
    assert torch.equal(logits_of(model, tokens, [240, *[1] * 30, 230, *[1] * 30]), whole)
    assert torch.equal(logits_of(model, tokens, [250, *[3] * 5, 5, 230, 16, 9, *[2] * 2, 1]), whole)
    for count in (2, 3, 5):
        threads(count)
        assert torch.equal(
            logits_of(model, tokens, [129, *[1] * 9, 130, 7, 3, *[2] * 7, 222, *[4] * 4]), whole
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@no_grad
def test_a_path_of_a_tree_has_the_bits_of_its_text(dtype: str) -> None:
    model, tokens = demo(dtype), (torch.arange(270)[None] * 37 + 11) % 4000 + 4
    chain = logits_of(model, tokens, [250, *[1] * 20])
    cache, planner = model.new_cache(1, 600), Planner(600, CPU)
    forward(model, tokens[:, :250], cache, planner.plan_chain(0, 250))
    path = tokens[0, 250:260].tolist()  # each second node another token below the same parent
    nodes = torch.tensor([[path[0], *(token for right in path[1:] for token in (9, right))]])
    parents = [parent for i in range(9) for parent in (2 * i, 2 * i)]
    tree = forward(model, nodes, cache, planner.plan_tree(250, parents))[0]
    assert torch.equal(tree[::2], chain[250:260])
    assert not torch.equal(tree[1], tree[2])


def test_exact_drafting_changes_no_token_in_bfloat16_and_takes_no_padding() -> None:
    model = demo("bfloat16")
    rows: list[int] = []
    real = model.run
    watched = NativeAdapter(model.fused_model, model.library)
    watched.pass_runner = watched
    watched.run = lambda tokens, *rest: rows.append(tokens.shape[1]) or real(tokens, *rest)  # type: ignore[method-assign]
    prompt = (list(model.tokenizer("def parse_arguments(argv=None):\n").input_ids) * 30)[:240]
    mask = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
    plain = Decoder(model, exact=True).generate(prompt, 60, ignore_eos=True)
    drafted = Decoder(
        watched, mask, draft_length=5, exit_policy=make_exit("fixed"), exact=True
    ).generate(prompt, 60, ignore_eos=True)
    assert (
        drafted.tokens
        == plain.tokens
        == Decoder(model).generate(prompt, 60, ignore_eos=True).tokens
    )
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    assert set(rows) <= {240, 1, 2, 3, 4, 5, 6}


# --- the layout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("out", "width"), [(2, 3), (64, 32), (70, 33), (34, 200)])
def test_panels_hold_a_matrix_and_compute_its_product(
    out: int, width: int, halves: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((out, width), (out,), (19, width))
    )
    library = cached_library() or building.load_or_build()
    for b in (bias, None):
        matrix = PanelPacker(library, weight.dtype).pack_dense(weight, b, halves)
        assert torch.equal(matrix.to_dense(), weight)
        assert matrix.shape == (out, width)
        expected = torch.nn.functional.linear(
            x.double(), weight.double(), None if b is None else b.double()
        )
        close = (
            {"rtol": 1e-2, "atol": 5e-2}
            if dtype == torch.bfloat16
            else {"rtol": 1e-4, "atol": 1e-4}
        )
        torch.testing.assert_close(matrix(x).double(), expected, **close)
        torch.testing.assert_close(
            matrix.add_to(x[:, :1].expand(19, out), x).double(),
            expected + x[:, :1].double(),
            **close,
        )
        again = matrix.pack_like(weight + 1, b)
        assert torch.equal(again.to_dense(), weight + 1)


def test_no_weight_is_held_twice() -> None:
    for name in ("llama", "llama-tied", "gemma3_text"):
        lean = fused(name)
        whole, read = lean.weight_bytes, lean.read_bytes
        model = to_native(lean)
        assert model.spec.engine == "native"
        matrices = [m for a, f in lean.layers for m in (a.qkv, a.out, f.gate_up, f.down)] + [
            lean.unembed
        ]
        assert all(isinstance(m, PanelLinear) for m in matrices)
        padded = sum(m.nbytes - m.shape[0] * m.shape[1] * 8 for m in matrices)
        assert model.weight_bytes == whole + padded
        assert model.read_bytes == read + padded


# --- building

X86_SETS = {"avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has loaded nothing, and an empty cache folder."""
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(building, "_loaded", {})
    monkeypatch.setattr(building, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "compiled"


def never(*arguments: object) -> bytes:
    raise AssertionError("built again")


def test_what_is_built_once_is_loaded_the_next_time(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        building, "load_library", lambda code, instructions: object()
    )  # whatever it is, it is not called here
    monkeypatch.setattr(building, "compile_library", lambda *_: b"code")
    assert cached_library() is None
    assert not elsewhere.exists()
    building.load_or_build()
    assert [path.suffix for path in elsewhere.iterdir()] == [".code"]
    monkeypatch.setattr(building, "compile_library", never)
    for fresh in (building.load_or_build, cached_library):
        monkeypatch.setattr(building, "_loaded", {})
        assert fresh() is not None
    path = next(elsewhere.iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(building, "_loaded", {})
    assert cached_library() is None
    monkeypatch.setattr(building, "compile_library", lambda *_: b"code")
    building.load_or_build()
    assert next(elsewhere.iterdir()).read_bytes().endswith(b"code")


def test_a_library_that_the_wheel_brought_needs_no_compiler(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "load_library", lambda code, instructions: code)
    monkeypatch.setattr(building, "compile_library", lambda name: f"code for {name}".encode())
    building.ship_libraries(building.SHIPPED)
    monkeypatch.setattr(building, "compile_library", never)
    best = f"code for {building.best_instruction_set()}".encode()
    for load in (building.load_or_build, cached_library):
        monkeypatch.setattr(building, "_loaded", {})
        assert load() == best
    assert not elsewhere.exists()


def test_a_wheel_brings_the_kernels_of_its_own_folder_and_not_of_an_installed_package(
    tmp_path: Path,
) -> None:
    package = tmp_path / "skipsearch" / "engine" / "native"
    package.mkdir(parents=True)
    (package / "build.py").write_text(
        "SHIPPED = None\ndef ship_libraries(progress):\n    print(__file__)\n    return []\n"
    )
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (tmp_path / "tools").mkdir()
    program = shutil.copy(
        Path(__file__).parents[2] / "tools" / "ship_kernels.py", tmp_path / "tools"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(package / "build.py")


@pytest.mark.parametrize(("machine", "others"), [("x86_64", {"neon"}), ("aarch64", X86_SETS)])
def test_a_wheel_brings_every_set_of_its_processors(
    machine: str, others: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building.platform, "machine", lambda: machine)
    monkeypatch.setattr(building, "compile_library", str.encode)
    shipped = {path.read_bytes().decode() for path in building.ship_libraries(tmp_path / "new")}
    assert shipped == set(building.INSTRUCTION_SETS) - others


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (
            None,
            r"needs a C\+\+ compiler and there is none: install g\+\+; until then the engine lean",
        ),
        ("/no/such/compiler", r"a C\+\+ compiler that works \(.*No such file"),
        ("false", r"a C\+\+ compiler that works \(exit status 1\): install g\+\+ 11 or newer"),
    ],
)
def test_without_a_compiler_lean_takes_its_place_and_a_sentence_says_so(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, said: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        monkeypatch.setattr(building.shutil, "which", lambda name: None)
    lean = fused("llama")
    with pytest.warns(EngineFallbackWarning, match=said):
        assert wrap_engine(lean, "native") is lean
    assert not any(isinstance(attention.qkv, PanelLinear) for attention, _ in lean.layers)


def test_what_the_kernels_cannot_do_is_said_and_lean_does_it() -> None:
    lean = fused("llama")
    for odd, said in (
        (replace(lean.spec, dtype=torch.float16), "is in float16"),
        (replace(lean.spec, device=torch.device("cuda")), "is for CPUs"),
    ):
        other = FusedAdapter(
            odd,
            lean._embedding,
            lean.layers,
            lean.rotary_tables,
            lean.norm,
            lean.unembed,
            lean.logit_steps,
        )
        with pytest.warns(
            EngineFallbackWarning, match=f"{said}.*; the engine lean takes its place"
        ):
            assert to_native(other) is other
    lean.layers[1] = (
        lean.layers[1][0],
        replace(lean.layers[1][1], act=GatedActivation(torch.relu)),
    )
    assert repack.why_not_native(lean) == "it has no activation relu"


def test_a_temporary_folder_that_no_code_runs_in_is_named(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    monkeypatch.setattr(building, "compile_library", lambda *_: b"no code")
    with pytest.raises(
        ModelError,
        match=r"could not be loaded .*set TMPDIR to another folder, or use --engine lean",
    ):
        building.load_or_build()
    assert list(elsewhere.iterdir()) == []


def test_code_of_a_better_processor_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        skipsearch_run_pass = skipsearch_run_draft = skipsearch_run_product = None

        @staticmethod
        def skipsearch_runs_here() -> int:
            return 0

    monkeypatch.setattr(building.ctypes, "CDLL", lambda path: Other)
    assert building.load_library(b"code", "avx512") is None


def test_the_set_is_the_best_that_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    avx512 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq"
    for machine, flags, best in (
        ("aarch64", "fp asimd", "plain"),
        ("aarch64", "fp asimd asimddp", "neon"),
        ("x86_64", "sse2", "plain"),
        ("x86_64", "sse2 avx2 fma", "plain"),
        ("x86_64", "sse2 avx2 fma f16c", "avx2"),
        ("x86_64", "avx2 fma f16c avx_vnni", "avxvnni"),
        ("x86_64", avx512, "avx512"),
        ("x86_64", f"{avx512} avx512_vnni", "avx512vnni"),
        ("x86_64", f"{avx512} avx512_vnni avx512_bf16 avx512vbmi", "avx512bf16"),
    ):
        word = "flags" if machine == "x86_64" else "Features"
        text = f"model name: x\n{word}\t\t: fpu {flags}\n"
        monkeypatch.setattr(building.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text: text)
        assert building.best_instruction_set.__wrapped__() == best


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_every_set_of_instructions_computes_the_same(instructions: str, dtype: torch.dtype) -> None:
    best = building.INSTRUCTION_SETS[building.best_instruction_set()]
    if not set(building.INSTRUCTION_SETS[instructions].x86) <= set(best.x86):
        pytest.skip(f"this processor has no {instructions}")
    lean = fused("qwen3", dtype)
    expected = passes(native("qwen3", dtype))
    model = repack.repack_weights(lean, building.load_or_build(instructions=instructions))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for mine, theirs in zip(passes(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    for whole, layers in zip(passes(model), passes(model, run_layer_loop), strict=True):
        assert torch.equal(whole, layers)


@pytest.mark.thorough
def test_a_forked_child_decodes_too() -> None:
    """None of the parent's threads live in it."""
    script = """
import os, torch
from skipsearch.engine import load_model
from skipsearch.decoding import Decoder
torch.set_num_threads(2)
model = load_model("synthetic:2x64", device="cpu", engine="native")
mine = Decoder(model).generate([1, 2, 3], 5).tokens
child = os.fork()
if child == 0:
    os._exit(0 if Decoder(model).generate([1, 2, 3], 5).tokens == mine else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), model.spec.engine)
"""
    building.load_or_build()
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert ran.stdout.split() == ["0", "native"], ran.stderr[-500:]
