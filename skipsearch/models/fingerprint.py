"""Detect changes to a model in memory: replaced modules, code, hooks or weights.

A decoder calls the modules of a model separately, with several tokens at a time, some of which are
rejected later. A caller's hook would see other calls than in transformers, or none, so hooks are
refused. Code that libraries add to a forward (such as moving an input to a device) is allowed, and
checked against the model's own forward, once for each fingerprint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

from skipsearch.errors import ForeignForward

# Packages whose code may change where and how a forward runs, because its output is checked. Our
# own package patches forwards during the check.
TRUSTED = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "kernels",
        "liger_kernel",
        "peft",
        "skipsearch",
        "torch",
        "torchao",
        "transformers",
    }
)


def refuse_foreign_code(model: nn.Module) -> None:
    """Refuse hooks, and replacements of a module's `forward`, from outside the trusted packages.

    Raises: ForeignForward.
    """
    for hook in _global_hooks().values():
        _refuse_foreign(hook, "torch.nn has a global forward hook")
    for module in _modules(model):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            _refuse_foreign(hook, "{name} has a forward hook", model, module)
        if "forward" in module.__dict__:
            _refuse_foreign(
                module.__dict__["forward"],
                "{name} has another forward than its class",
                model,
                module,
            )


def forward_fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal as long as the same modules run the same code and hooks.

    It has only weak references to modules and functions, so it keeps no model alive.
    """
    parts: list[Any] = [*_global_hooks()]
    forwards: dict[type, Any] = {}
    for module in _modules(model):
        kind = type(module)
        if kind not in forwards:
            forwards[kind] = _reference(kind.forward)
        parts += (weakref.ref(module), kind, *module._forward_pre_hooks, *module._forward_hooks)
        if "forward" in module.__dict__:
            parts.append(_reference(module.__dict__["forward"]))
    return (*parts, *forwards.values())


def weight_fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal as long as no weight is replaced, moved or written."""
    return tuple(
        (id(weight), weight.data_ptr(), None if weight.is_inference() else weight._version)
        for weight in model.parameters()
    )


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, each once, parents first.

    This takes a third of the time of `Module.modules`, which builds their names.
    """
    seen, stack = {model}, [model]
    while stack:
        module = stack.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _global_hooks() -> Mapping[int, Callable[..., Any]]:
    return {**nn_module._global_forward_pre_hooks, **nn_module._global_forward_hooks}


def _refuse_foreign(
    code: Callable[..., Any],
    sentence: str,
    model: nn.Module | None = None,
    module: nn.Module | None = None,
) -> None:
    if _package(code) in TRUSTED:
        return
    name = (
        next((name for name, other in model.named_modules() if other is module), "")
        if model is not None
        else ""
    )
    where = sentence.format(name=name or "the model itself")
    raise ForeignForward(
        f"{where} ({getattr(code, '__qualname__', type(code).__qualname__)}): drafted tokens are "
        "verified "
        "several at a time and some are rejected, so it would not see what it sees in "
        "transformers: remove it, "
        "or have transformers write the text (fallback=True)"
    )


def _package(code: Any) -> str:
    """Return the package with the code of a callable, also if a wrapper has another name."""
    while isinstance(code, MethodType | partial):
        code = code.__func__ if isinstance(code, MethodType) else code.func
    module = getattr(code, "__globals__", {}).get("__name__") or type(code).__module__
    return str(module).partition(".")[0]


def _reference(code: Any) -> Any:
    try:
        return weakref.ref(code)
    except TypeError:  # this callable does not support weak references
        return id(code)
