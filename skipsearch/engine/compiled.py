"""The compiled engine: each kind of layer and sub-layer compiled once for this CPU, and reused by every one of that kind and every mask.

The pieces of `pieces.py` go through torch's ahead-of-time compiler twice: for one row, and for any number of rows that a verify pass may
have. What comes out is kept (`kept.py`) under a name that says for which shapes, versions and processor it was made.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.engine import opaque, pieces
from skipsearch.engine.kept import Shelf, open_shelf
from skipsearch.engine.opaque import stand_in, weights_are_arguments
from skipsearch.engine.package import load_package, make_package
from skipsearch.engine.pieces import attention_piece, head_piece, layer_piece, mlp_piece, weights_of
from skipsearch.errors import ModelError
from skipsearch.machine import cache_folder, cpu_name
from skipsearch.models import bands, linear, norms
from skipsearch.models import lean as lean_module
from skipsearch.models.bands import BANDED_ROWS
from skipsearch.models.lean import MLP, Attention, LeanAdapter
from skipsearch.models.norms import Norm
from skipsearch.models.spec import PassRunner

Progress = Callable[[int, int], None]


class CompiledAdapter:
    """A fused model on a CPU whose short passes run compiled pieces; longer ones are prefills and run uncompiled."""

    passes: PassRunner | None = None

    def __init__(self, lean: LeanAdapter, progress: Progress = lambda done, total: None, kept: Shelf | None = None):
        """kept: where all of its code lies; None: what is missing is compiled. Raises: ModelError, _Missing."""
        self.lean, self.tokenizer, self.spec = lean, lean.tokenizer, replace(lean.spec, engine="compiled")
        self.new_cache, self.embed, self.weight_bytes, self.read_bytes = lean.new_cache, lean.embed, lean.weight_bytes, lean.read_bytes
        shop = _Shop(lean, progress)
        self._layers = [(shop.attention(a), shop.mlp(m), shop.layer(a, m)) for a, m in lean.layers]
        self._head, self._many = shop.head(), torch.empty(1024, dtype=self.spec.dtype)
        shop.make(kept)

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        rows = h.shape[1]
        if len(h) != 1 or rows > BANDED_ROWS or not (plan.chain or rows > 1):
            return self.lean.block(i, h, cache, plan, attn=attn, mlp=mlp)
        attention, feed_forward, layer = self._layers[i]
        if attn and rows == 1 and not self._sees_all(i, plan):
            h, attn = self.lean.block(i, h, cache, plan, mlp=False), False
        flat = h[0]
        if attn:
            flat = (layer if mlp else attention)(rows, flat, *self._around(i, cache, plan))
        elif mlp:
            flat = feed_forward(rows, flat)
        return flat[None]

    def _sees_all(self, i: int, plan: PassPlan) -> bool:
        """Whether a row looks at every key of the pass: none of them hidden behind it, none out of the layer's window."""
        window = self.lean.layers[i][0].kind.window
        return plan.visible is None and (window is None or plan.keys <= window)

    def head(self, h: Tensor) -> Tensor:
        if len(h) != 1 or h.shape[1] > BANDED_ROWS:
            return self.lean.head(h)
        logits = self._head(h.shape[1], h[0])[None]
        for piece in self.lean.after:
            logits = piece(logits)
        return logits

    def _around(self, i: int, cache: KVCache, plan: PassPlan) -> tuple[Tensor, ...]:
        """What the attention of layer i works on beside its hidden states: keys, values, slots, cos, sin, mask."""
        part, step = self.lean.layers[i][0], self.lean.pass_of(plan)
        keys, values = cache.keys[i], cache.values[i]
        if keys is None or values is None:
            like = torch.empty(1, part.kv_heads, 0, part.head_dim, dtype=self.spec.dtype)
            keys, values = cache.buffers(i, like, like)
        shown = self._numbers(plan.keys) if plan.positions.shape[1] == 1 else step.mask(part.kind)
        return keys, values, plan.slots[0], *step.turns(part.kind), shown

    def _numbers(self, count: int) -> Tensor:
        """A tensor with `count` entries. Compiled code reads the number of keys from its length; the values are never read."""
        many = self._many
        if len(many) < count:  # another thread may put a shorter one there meanwhile, which is then made again
            many = self._many = torch.empty(2 * count, dtype=self.spec.dtype)
        return many[:count]


class _Piece:
    """A kind of layer, sub-layer or head: how it is written, on what example and, once made, its code for one row and for several."""

    def __init__(self, write: Callable[[bool], Callable[..., Tensor]], example: Callable[[int], tuple[tuple[Tensor, ...], tuple[Any, ...]]],
                 weights: Sequence[Tensor]):
        self.write, self.example, self.weights = write, example, weights
        self.one: Any = None
        self.many: Any = None

    def bound(self, weights: Sequence[Tensor]) -> Callable[..., Tensor]:
        mine = list(weights)

        def run(rows: int, *inputs: Tensor) -> Tensor:
            result: Tensor = (self.one if rows == 1 else self.many).boxed_run([*inputs, *mine])[0]
            return result

        return run


class _Shop:
    """Collects the kinds of pieces that a model is made of, then makes each or finds it made."""

    def __init__(self, lean: LeanAdapter, progress: Progress):
        self.lean, self.progress = lean, progress
        self.pieces: dict[str, _Piece] = {}
        self.maker = _maker()
        self.hidden = torch.zeros(0, lean.spec.hidden, dtype=lean.spec.dtype)

    def attention(self, part: Attention) -> Callable[..., Tensor]:
        return self._piece("attention", [part], lambda one: attention_piece(part, one), self._around(part))

    def mlp(self, part: MLP) -> Callable[..., Tensor]:
        return self._piece("mlp", [part], lambda one: mlp_piece(part, one), self._only_rows)

    def layer(self, attention: Attention, mlp: MLP) -> Callable[..., Tensor]:
        """Both in one call: a pass over the full model makes half as many."""
        return self._piece("layer", [attention, mlp], lambda one: layer_piece(attention, mlp, one), self._around(attention))

    def _around(self, part: Attention) -> Callable[[int], tuple[tuple[Tensor, ...], tuple[Any, ...]]]:
        h, turned = self.hidden, self._turned(part)

        def example(rows: int) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
            count, keys, capacity = _some("rows", rows), torch.export.Dim("keys", min=2), torch.export.Dim("capacity", min=2)
            kv = h.new_zeros(1, part.kv_heads, 128, part.head_dim)
            tensors = (h.new_zeros(rows, h.shape[-1]), kv, kv.clone(), torch.arange(rows),
                       h.new_zeros(1, rows, 1, turned), h.new_zeros(1, rows, 1, turned),
                       h.new_zeros(96) if rows == 1 else h.new_zeros(1, 1, rows, 96))
            shown = {0: keys} if rows == 1 else {2: count, 3: keys}
            shapes = (_at(count, 0), {2: capacity}, {2: capacity}, _at(count, 0), _at(count, 1), _at(count, 1), shown)
            return tensors, shapes

        return example

    def _turned(self, part: Attention) -> int:
        """Width of the part of a head that positions rotate."""
        return self.lean.tables[part.kind.layer_type].width

    def head(self) -> Callable[..., Tensor]:
        norm, matrix = self.lean.norm, self.lean.unembed
        weights = [norm.weight, matrix.weight, *([] if matrix.bias is None else [matrix.bias])]
        piece = self._kept("head", _named(norm, matrix), lambda one: head_piece(norm, matrix, one),
                           self._only_rows, weights)
        return piece.bound(weights)

    def make(self, kept: Shelf | None) -> None:
        """Raises: ModelError where nothing can be compiled; _Missing where nothing may be and something is not kept."""
        shelf = kept or _opened()
        work = [(name, piece, one) for name, piece in self.pieces.items() for one in (True, False)]
        if kept and not all(kept.path(_file(name, one)).exists() for name, _, one in work):
            raise _Missing   # before the others are loaded
        for done, (name, piece, one) in enumerate(work):
            self.progress(done, len(work))
            setattr(piece, "one" if one else "many", _compiled(_file(name, one), piece, 1 if one else 6, shelf, kept is None))
        self.progress(len(work), len(work))

    def _piece(self, kind: str, parts: Sequence[Attention | MLP], write: Callable[[bool], Callable[..., Tensor]],
               example: Any) -> Callable[..., Tensor]:
        weights = [weight for part in parts for weight in weights_of(part)]
        named = _named(*(getattr(part, name) for part in parts for name in part.__dataclass_fields__ if name not in ("index", "kind")),
                       *(self._turned(part) for part in parts if isinstance(part, Attention)))
        return self._kept(kind, named, write, example, weights).bound(weights)

    def _kept(self, kind: str, named: str, write: Any, example: Any, weights: Sequence[Tensor]) -> _Piece:
        name = f"{kind}-{hashlib.sha256(f'{named} {self.maker}'.encode()).hexdigest()[:24]}"
        return self.pieces.setdefault(name, _Piece(write, example, weights))

    def _only_rows(self, rows: int) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        return (self.hidden.new_zeros(rows, self.hidden.shape[-1]),), (_at(_some("rows", rows), 0),)


def compile_model(model: LeanAdapter, progress: Progress = lambda done, total: None) -> CompiledAdapter:
    """Raises: ModelError for a model on a GPU, or where there is no C++ compiler."""
    if model.spec.device.type != "cpu":
        raise ModelError(f"the engine compiled is for CPUs and {model.spec.id} is on {model.spec.device}: use --engine graph or lean")
    return CompiledAdapter(model, progress)


def kept_model(model: LeanAdapter, shelf: Shelf) -> CompiledAdapter | None:
    """The model under code that was compiled for it before; None where a piece is missing or cannot be loaded. Compiles nothing."""
    try:
        return CompiledAdapter(model, kept=shelf)
    except (_Missing, ModelError):
        return None


class _Missing(Exception):
    """A piece is not kept."""


def _opened() -> Shelf:
    try:
        return open_shelf()
    except OSError as error:
        raise _no_place(cache_folder() / "compiled", error) from None


def _file(name: str, one: bool) -> str:
    return f"{name}-{'one' if one else 'many'}"


def _compiled(name: str, piece: _Piece, rows: int, shelf: Shelf, compiling: bool) -> Any:
    """The code of a piece, loaded. It is kept once it was loaded, and what was kept whole is never removed for a load that fails.

    Raises: ModelError; _Missing if it is not kept and `compiling` is False.
    """
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        if (kept := shelf.read(name)) is not None:
            return load_package(kept, f"; if there is room, remove {shelf.path(name)}")
    except OSError as error:
        raise _no_place(shelf.folder, error) from None
    if not compiling:
        raise _Missing
    try:
        made = _compile(piece, rows)
    except (InvalidCxxCompiler, CppCompileError) as error:
        raise ModelError(f"the engine compiled needs a C++ compiler that works ({str(error).splitlines()[0][:120]}): install g++, or "
                         "use --engine lean") from None
    loaded = load_package(made)
    try:
        shelf.keep(name, made)
    except OSError as error:
        raise _no_place(shelf.folder, error) from None
    return loaded


def _compile(piece: _Piece, rows: int) -> bytes:
    """The package that torch makes of a piece. Raises: ModelError; InvalidCxxCompiler and CppCompileError of torch."""
    write = piece.write(rows == 1)

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return write(*tensors)

    tensors, shapes = piece.example(rows)
    weights = [stand_in(weight) for weight in piece.weights]
    with warnings.catch_warnings(), torch.no_grad(), weights_are_arguments():
        warnings.simplefilter("ignore")
        program = torch.export.export(Module(), (*tensors, *weights), strict=False,
                                      dynamic_shapes=((*shapes, *[None] * len(weights)),))
        return make_package(program)


def _no_place(folder: Path, error: OSError) -> ModelError:
    return ModelError(f"compiled code cannot be kept in {folder} ({error.strerror}): set SKIPSEARCH_CACHE_DIR to a folder with room, or "
                      "use --engine lean")


def _named(*values: Any) -> str:
    """What a piece was made for: shapes, dtypes and settings, but no weight."""
    return " ".join(_name(value) for value in values)


def _name(value: Any) -> str:
    if isinstance(value, Norm):
        return f"norm{tuple(value.weight.shape)}{value.weight.dtype}{value.eps}{value.wide}"
    if hasattr(value, "added"):
        return f"{type(value).__name__}{tuple(value.weight.shape)}{value.weight.dtype}{value.bias is not None}"
    return getattr(value, "__name__", None) or (type(value).__name__ if callable(value) else repr(value))


def _maker() -> str:
    """Whatever else decides the code that comes out: our own source, torch, the processor, its threads."""
    source = "".join(inspect.getsource(module) for module in (sys.modules[__name__], opaque, pieces, lean_module, bands, linear, norms))
    return f"{hashlib.sha256(source.encode()).hexdigest()} {torch.__version__} {cpu_name()} {torch.get_num_threads()}"


def _some(name: str, rows: int) -> Any:
    return None if rows == 1 else torch.export.Dim(name, min=2, max=BANDED_ROWS)


def _at(size: Any, dimension: int) -> dict[int, Any]:
    return {} if size is None else {dimension: size}
