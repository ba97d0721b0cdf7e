"""A model read from itself: which modules are its layers, and in each of them the attention and the rest that may be switched off.

Nothing of the model is altered. The modules on the way to the layers, the layers and their parts are copied without their weights, and
only these copies know of passes: in a pass, a layer or a part of it asks what it should do.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

from torch import Tensor, nn

from skipsearch.errors import ModelError

Call = Callable[..., Any]


class Step(Protocol):
    """What goes on while a forward runs."""

    def layer(self, i: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def part(self, i: int, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class _Now(threading.local):
    step: Step | None = None


@dataclass(frozen=True)
class Blank:
    """What a switched-off part returns: nothing to add. size: of a tuple, None for a tensor; width: of its last dimension.

    residual: where its caller leaves the sum to it, the argument that it would add its branch to, by position or by name.
    """

    size: int | None
    width: int
    residual: int | str | None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.residual is None:
            x = first_tensor(args, kwargs)
            out = x.new_zeros(*x.shape[:-1], self.width)
        else:
            out = args[self.residual] if isinstance(self.residual, int) else kwargs[self.residual]
        return out if self.size is None else (out, *[None] * (self.size - 1))


@dataclass
class LayerParts:
    """mixers: parts that read other tokens, by attention or by a recurrent state. recurrent: those of them that keep such a state.

    off: of each part that a mixer or an MLP consists of. size: of what the layer returns.
    """

    mixers: set[str] = field(default_factory=set)
    recurrent: set[str] = field(default_factory=set)
    off: dict[str, Blank] = field(default_factory=dict)
    size: int | None = None

    def returned(self, h: Tensor) -> Any:
        return h if self.size is None else (h, *[None] * (self.size - 1))


class Skeleton:
    """A copy of a model's modules down to the parts of its layers; the weights are the model's own. `during` runs a step.

    Raises: ModelError if no list of modules can be the layers.
    """

    def __init__(self, model: nn.Module, n_layers: int):
        self._now = _Now()
        self.path = _layers_path(model, n_layers)
        self.model: Any = _clone(model)
        parent = self.model
        for name in self.path.split("."):
            child = _clone(parent._modules[name])
            parent._modules[name] = child
            parent = child
        self.layers: list[Any] = []
        for i in range(n_layers):
            layer = parent._modules[str(i)] = _clone(parent._modules[str(i)])
            for name, part in list(layer._modules.items()):
                if part is not None and not isinstance(part, nn.ModuleList | nn.ModuleDict):
                    layer._modules[name] = self._asking(_clone(part), i, name)
            self.layers.append(self._asking(layer, i, None))
        self.arguments = [list(inspect.signature(type(layer).forward).parameters)[1:] for layer in self.layers]

    def _asking(self, module: Any, i: int, name: str | None) -> Any:
        # A module that held itself, by a bound method, would stay in memory until the garbage collector runs.
        function, found, now = type(module).forward, weakref.ref(module), self._now

        def forward(*args: Any, **kwargs: Any) -> Any:
            step, call = now.step, MethodType(function, found())
            if step is None:
                return call(*args, **kwargs)
            return step.layer(i, call, args, kwargs) if name is None else step.part(i, name, call, args, kwargs)

        module.forward = forward
        return module

    def during(self, step: Step, run: Callable[[], Any]) -> Any:
        before, self._now.step = self._now.step, step
        try:
            return run()
        finally:
            self._now.step = before


class Discovery:
    """A step that runs everything and notes which parts of a layer read other tokens and what each part takes and returns."""

    def __init__(self, skeleton: Skeleton):
        self.parts = [LayerParts() for _ in skeleton.layers]
        self._skeleton, self._inside = skeleton, list[tuple[int, str]]()

    def layer(self, i: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(*args, **kwargs)
        self.parts[i].size = len(out) if isinstance(out, tuple) else None
        return out

    def part(self, i: int, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside.append((i, name))
        try:
            out = call(*args, **kwargs)
        finally:
            self._inside.pop()
        first = out[0] if isinstance(out, tuple) and out else out
        weights = list(self._skeleton.layers[i]._modules[name].parameters())
        if isinstance(first, Tensor) and any(w.dim() > 1 for w in weights):
            x = first_tensor(args, kwargs)
            if x is not None and first.shape[:-1] == x.shape[:-1]:
                self.parts[i].off[name] = Blank(len(out) if isinstance(out, tuple) else None, first.shape[-1],
                                                _residual(first, x, args, kwargs))
        return out

    def attends(self, layer_idx: int) -> None:
        """Told by the cache that K/V of a layer are written. Raises: ModelError where that is not one part of that layer."""
        name = self._mixer(layer_idx)
        if self.parts[layer_idx].mixers - self.parts[layer_idx].recurrent:
            raise ModelError("a layer writes more to the cache than its own keys and values")
        if name in self.parts[layer_idx].recurrent:
            raise ModelError("one module of it both attends and keeps a recurrent state")
        self.parts[layer_idx].mixers.add(name)

    def keeps(self, layer_idx: int) -> None:
        """Told by the cache that a recurrent state of a layer is written. Raises: ModelError as `attends` does."""
        name = self._mixer(layer_idx)
        if name in self.parts[layer_idx].mixers - self.parts[layer_idx].recurrent:
            raise ModelError("one module of it both attends and keeps a recurrent state")
        self.parts[layer_idx].mixers.add(name)
        self.parts[layer_idx].recurrent.add(name)

    def _mixer(self, layer_idx: int) -> str:
        if not self._inside:
            raise ModelError("its attention is no module of its own")
        i, name = self._inside[0]
        if layer_idx != i:
            raise ModelError("a layer writes more to the cache than its own keys and values")
        return name


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


def _residual(out: Tensor, first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next((place for place, x in places if isinstance(x, Tensor) and x is not first and x.shape == out.shape
                 and x.dtype == out.dtype), None)


def _clone(module: Any) -> Any:
    if "forward" in vars(module):
        raise ModelError("hooks of another library stand between its modules")
    clone = copy.copy(module)
    clone.__dict__["_modules"] = dict(module._modules)   # `copy.copy` shares it
    return clone


def _layers_path(model: Any, n_layers: int) -> str:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    inside = {id(module) for module in (decoder or model).modules()}
    lists = [(sum(weight.numel() for weight in module.parameters()), -name.count("."), name) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList) and len(module) == n_layers and id(module) in inside]
    if not lists:
        raise ModelError(f"no list of modules in it has the {n_layers} layers that its config names")
    return max(lists)[2]
