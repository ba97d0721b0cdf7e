"""Read a model's structure: its layers, and the parts of layers that can be switched off.

The model is not altered. The modules that contain the layers, the layers and their parts are copied
without their weights. In a pass, a copied layer or part asks the interceptor what to do.
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

ForwardCall = Callable[..., Any]
# An argument of layers and attentions: K/V by kind of layer, for layers that compute none.
SHARED_KV = "shared_kv_states"


class Interceptor(Protocol):
    """An object that decides what layers and their parts do during a forward."""

    def on_layer(
        self, i: int, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def on_part(
        self, i: int, name: str, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class _CurrentInterceptor(threading.local):
    interceptor: Interceptor | None = None


@dataclass(frozen=True)
class NullOutput:
    """The output of a skipped part, which adds nothing to the residual stream."""

    tuple_size: int | None  # None: a tensor, not a tuple
    width: int  # of its last dimension
    # If the part adds the residual itself: position or name of the argument with the residual.
    residual: int | str | None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.residual is None:
            x = first_tensor(args, kwargs)
            out = x.new_zeros(*x.shape[:-1], self.width)
        else:
            out = args[self.residual] if isinstance(self.residual, int) else kwargs[self.residual]
        return out if self.tuple_size is None else (out, *[None] * (self.tuple_size - 1))


@dataclass
class LayerParts:
    """The parts of a layer, by the name of the module."""

    token_mixers: set[str] = field(default_factory=set)  # parts that read other tokens
    recurrent: set[str] = field(default_factory=set)  # token mixers with a recurrent state
    # By part that is a token mixer or an MLP.
    null_outputs: dict[str, NullOutput] = field(default_factory=dict)
    tuple_size: int | None = None  # of the layer's output; None: a tensor

    def wrap_output(self, h: Tensor) -> Any:
        return h if self.tuple_size is None else (h, *[None] * (self.tuple_size - 1))


class InstrumentedModel:
    """A copy of a model's modules down to the parts of its layers, with the model's own weights.

    Raises: ModelError if no list of modules can be the layers.
    """

    def __init__(self, model: nn.Module, n_layers: int):
        self._current = _CurrentInterceptor()
        self.layers_path = _find_layers_path(model, n_layers)
        self.model: Any = _clone_module(model)
        parent = self.model
        for name in self.layers_path.split("."):
            child = _clone_module(parent._modules[name])
            parent._modules[name] = child
            parent = child
        self.layers: list[Any] = []
        for i in range(n_layers):
            layer = parent._modules[str(i)] = _clone_module(parent._modules[str(i)])
            for name, part in list(layer._modules.items()):
                if part is not None and not isinstance(part, nn.ModuleList | nn.ModuleDict):
                    layer._modules[name] = self._intercept(_clone_module(part), i, name)
            self.layers.append(self._intercept(layer, i, None))
        self.layer_arg_names = [
            list(inspect.signature(type(layer).forward).parameters)[1:] for layer in self.layers
        ]

    def _intercept(self, module: Any, i: int, name: str | None) -> Any:
        # A bound method would be a reference cycle, which only the garbage collector frees.
        class_forward = type(module).forward
        module_ref = weakref.ref(module)
        current = self._current

        def forward(*args: Any, **kwargs: Any) -> Any:
            interceptor, call = current.interceptor, MethodType(class_forward, module_ref())
            if interceptor is None:
                return call(*args, **kwargs)
            return (
                interceptor.on_layer(i, call, args, kwargs)
                if name is None
                else interceptor.on_part(i, name, call, args, kwargs)
            )

        module.forward = forward
        return module

    def run_with(self, interceptor: Interceptor, run: Callable[[], Any]) -> Any:
        """Call `run` while `interceptor` decides what layers do."""
        before, self._current.interceptor = self._current.interceptor, interceptor
        try:
            return run()
        finally:
            self._current.interceptor = before


class StructureProbe:
    """An interceptor that runs everything, and notes the properties of each part of a layer.

    They are: whether it reads other tokens, its arguments and its output.
    """

    def __init__(self, model: InstrumentedModel):
        self.parts = [LayerParts() for _ in model.layers]
        self.lending_layers = set[int]()  # whose K/V later layers read
        self._model, self._part_stack = model, list[tuple[int, str]]()

    def on_layer(
        self, i: int, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        shared: Mapping[str, Any] = kwargs.get(SHARED_KV, {})
        before = dict(shared)
        out = call(*args, **kwargs)
        if any(before.get(key) is not states for key, states in shared.items()):
            self.lending_layers.add(i)
        self.parts[i].tuple_size = len(out) if isinstance(out, tuple) else None
        return out

    def on_part(
        self, i: int, name: str, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._part_stack.append((i, name))
        try:
            out = call(*args, **kwargs)
        finally:
            self._part_stack.pop()
        if SHARED_KV in kwargs:  # an attention, even if it writes nothing to the cache
            self.parts[i].token_mixers.add(name)
        first = out[0] if isinstance(out, tuple) and out else out
        weights = list(self._model.layers[i]._modules[name].parameters())
        if isinstance(first, Tensor) and any(w.dim() > 1 for w in weights):
            x = first_tensor(args, kwargs)
            if x is not None and first.shape[:-1] == x.shape[:-1]:
                self.parts[i].null_outputs[name] = NullOutput(
                    len(out) if isinstance(out, tuple) else None,
                    first.shape[-1],
                    _find_residual(first, x, args, kwargs),
                )
        return out

    def note_attention(self, layer_idx: int) -> None:
        """Note that the running part of a layer writes K/V to the cache.

        Raises: ModelError if not exactly one part of the layer does.
        """
        name = self._current_mixer(layer_idx)
        if self.parts[layer_idx].token_mixers - self.parts[layer_idx].recurrent:
            raise ModelError("a layer writes more to the cache than its own keys and values")
        if name in self.parts[layer_idx].recurrent:
            raise ModelError("one module of it both attends and keeps a recurrent state")
        self.parts[layer_idx].token_mixers.add(name)

    def note_state(self, layer_idx: int) -> None:
        """Note that the running part of a layer writes a recurrent state to the cache.

        Raises: ModelError as `note_attention` does.
        """
        name = self._current_mixer(layer_idx)
        if name in self.parts[layer_idx].token_mixers - self.parts[layer_idx].recurrent:
            raise ModelError("one module of it both attends and keeps a recurrent state")
        self.parts[layer_idx].token_mixers.add(name)
        self.parts[layer_idx].recurrent.add(name)

    def _current_mixer(self, layer_idx: int) -> str:
        if not self._part_stack:
            raise ModelError("its attention is no module of its own")
        i, name = self._part_stack[0]
        if layer_idx != i:
            raise ModelError("a layer writes more to the cache than its own keys and values")
        return name


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


def _find_residual(
    out: Tensor, first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | str | None:
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next(
        (
            key
            for key, x in arguments
            if isinstance(x, Tensor)
            and x is not first
            and x.shape == out.shape
            and x.dtype == out.dtype
        ),
        None,
    )


def _clone_module(module: Any) -> Any:
    if "forward" in vars(module):
        raise ModelError("another library has put hooks between its modules")
    clone = copy.copy(module)
    clone.__dict__["_modules"] = dict(module._modules)  # `copy.copy` shares it
    return clone


def _find_layers_path(model: Any, n_layers: int) -> str:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    decoder_modules = {id(module) for module in (decoder or model).modules()}
    lists = [
        (sum(weight.numel() for weight in module.parameters()), -name.count("."), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == n_layers
        and id(module) in decoder_modules
    ]
    if not lists:
        raise ModelError(
            f"no list of modules in it has the {n_layers} layers that its config names"
        )
    return max(lists)[2]
