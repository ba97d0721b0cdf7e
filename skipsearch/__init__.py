"""skipsearch: search which sub-layers a language model may skip while it drafts for itself, and decode losslessly with the answer.

    import skipsearch as ss
    model = ss.load_model("demo")
    decoder = ss.Decoder(model, ss.load_profile("profile.yaml"))
    print(decoder.generate(model.tokenizer("def main(").input_ids, max_new_tokens=64).text)

Names are resolved on first use: reading a profile does not load torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from skipsearch.version import __version__

# Threads of torch that have nothing to do spin by default. They take the cores from the threads of the engine native between its passes: on
# two threads, drafting was then three times as slow. OpenMP reads this once, when torch is loaded. They spin for some microseconds first:
# llama.cpp, which shares torch's OpenMP where `bench` runs it, waits for its threads many times a token, and took 13 ms instead of 0.6.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from skipsearch.decoding import Chunk, Decoder, Generation, Request, Session, attach, detach, generate
    from skipsearch.engine import load_model
    from skipsearch.errors import (
        DecodeError,
        ExportError,
        MaskError,
        ModelError,
        NotCarriedOut,
        ProfileError,
        SearchError,
        SkipSearchError,
        TaskError,
    )
    from skipsearch.mask import SkipMask
    from skipsearch.models import ModelAdapter, ModelSpec, adapt
    from skipsearch.profile import Profile, load_profile, save_profile
    from skipsearch.recipe import Recipe
    from skipsearch.stats import DecodeStats, Trial
    from skipsearch.tasks import Task, load_task
    from skipsearch.tuning import tune

_HOMES = {
    "skipsearch.decoding": ("Chunk", "Decoder", "Generation", "Request", "Session", "attach", "detach", "generate"),
    "skipsearch.errors": ("DecodeError", "ExportError", "MaskError", "ModelError", "NotCarriedOut", "ProfileError", "SearchError",
                          "SkipSearchError", "TaskError"),
    "skipsearch.mask": ("SkipMask",),
    "skipsearch.engine": ("load_model",),
    "skipsearch.models": ("ModelAdapter", "ModelSpec", "adapt"),
    "skipsearch.profile": ("Profile", "load_profile", "save_profile"),
    "skipsearch.recipe": ("Recipe",),
    "skipsearch.stats": ("DecodeStats", "Trial"),
    "skipsearch.tasks": ("Task", "load_task"),
    "skipsearch.tuning": ("tune",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["Chunk", "DecodeError", "DecodeStats", "Decoder", "ExportError", "Generation", "MaskError", "ModelAdapter", "ModelError",
           "ModelSpec", "NotCarriedOut", "Profile", "ProfileError", "Recipe", "Request", "SearchError", "Session", "SkipMask",
           "SkipSearchError", "Task", "TaskError", "Trial", "__version__", "adapt", "attach", "detach", "generate", "load_model",
           "load_profile", "load_task", "save_profile", "tune"]


def __dir__() -> list[str]:
    """What tab completion shows."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'skipsearch' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
