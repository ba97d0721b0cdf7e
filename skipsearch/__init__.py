"""skipsearch: search which sub-layers a language model may skip while it drafts for itself, and
decode losslessly with the answer.

    import skipsearch as ss
    decoder = ss.load_decoder("profile.yaml")
    ids = decoder.model.tokenizer("def main(").input_ids
    print(decoder.generate(ids, max_new_tokens=64).text)

Names are resolved on first use: reading a profile does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from skipsearch.core.constraint import Constraint
    from skipsearch.core.mask import SkipMask
    from skipsearch.core.recipe import Recipe
    from skipsearch.core.stats import DecodeStats, Trial
    from skipsearch.decoding import Chunk, Decoder, Generation, Request, Session, load_decoder
    from skipsearch.engine import load_model
    from skipsearch.errors import (
        DecodeError,
        ExportError,
        MaskError,
        ModelError,
        ProfileError,
        SearchError,
        SkipSearchError,
        TaskError,
        UnsupportedRequest,
    )
    from skipsearch.integrations import attach, detach, generate
    from skipsearch.models import ModelAdapter, ModelSpec, adapt
    from skipsearch.profile import Profile, load_profile, save_profile
    from skipsearch.tasks import Task, load_task
    from skipsearch.tuning.driver import tune

_LAZY_EXPORTS = {
    "skipsearch.decoding": ("Chunk", "Decoder", "Generation", "Request", "Session", "load_decoder"),
    "skipsearch.integrations": ("attach", "detach", "generate"),
    "skipsearch.errors": (
        "DecodeError",
        "ExportError",
        "MaskError",
        "ModelError",
        "ProfileError",
        "SearchError",
        "SkipSearchError",
        "TaskError",
        "UnsupportedRequest",
    ),
    "skipsearch.core.constraint": ("Constraint",),
    "skipsearch.core.mask": ("SkipMask",),
    "skipsearch.engine": ("load_model",),
    "skipsearch.models": ("ModelAdapter", "ModelSpec", "adapt"),
    "skipsearch.profile": ("Profile", "load_profile", "save_profile"),
    "skipsearch.core.recipe": ("Recipe",),
    "skipsearch.core.stats": ("DecodeStats", "Trial"),
    "skipsearch.tasks": ("Task", "load_task"),
    "skipsearch.tuning.driver": ("tune",),
}
_MODULE_OF = {name: module for module, names in _LAZY_EXPORTS.items() for name in names}

__all__ = [
    "Chunk",
    "Constraint",
    "DecodeError",
    "DecodeStats",
    "Decoder",
    "ExportError",
    "Generation",
    "MaskError",
    "ModelAdapter",
    "ModelError",
    "ModelSpec",
    "Profile",
    "ProfileError",
    "Recipe",
    "Request",
    "SearchError",
    "Session",
    "SkipMask",
    "SkipSearchError",
    "Task",
    "TaskError",
    "Trial",
    "UnsupportedRequest",
    "__version__",
    "adapt",
    "attach",
    "detach",
    "generate",
    "load_decoder",
    "load_model",
    "load_profile",
    "load_task",
    "save_profile",
    "tune",
]


def __dir__() -> list[str]:
    """Return the names for tab completion."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'skipsearch' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
