"""Check the arguments of a decoder before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.errors import DecodeError, ModelError, ProfileError


def short_repr(value: Any) -> str:
    """Return a value on one line of at most 60 characters, for an error message."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 60 else line[:57] + "..."


def check_model(model: Any) -> None:
    """Raise ModelError if `model` is not a ModelAdapter."""
    if hasattr(model, "spec"):
        return
    if hasattr(model, "generation_config"):
        raise ModelError(
            f"the model is a {type(model).__name__} of transformers: give skipsearch.adapt(model, "
            "tokenizer)"
        )
    raise ModelError(
        f"the model is {short_repr(model)}; give what skipsearch.load_model or skipsearch.adapt "
        "returns"
    )


def profile_type_error(profile: Any) -> ProfileError:
    """Return the error that says that a value is not a profile."""
    if isinstance(profile, str | Path):
        return ProfileError(
            f"the profile is given as the text {short_repr(str(profile))}: load it first with "
            "skipsearch.load_profile(path)"
        )
    # The second positional argument of `model.generate` is a GenerationConfig.
    if type(profile).__name__ == "GenerationConfig":
        return ProfileError("the profile is a GenerationConfig: pass it as generation_config=…")
    return ProfileError(
        f"the profile is a {type(profile).__name__}, {short_repr(profile)}; give what "
        "skipsearch.load_profile returns, "
        "a Recipe, a SkipMask, or None for plain decoding"
    )


def as_token_ids(prompt: Any) -> list[int]:
    """Return the ids of one sequence: a list, a tuple, an array or a tensor [T] or [1, T].

    Raises: DecodeError.
    """
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        raise DecodeError(
            f"the prompt is a {type(prompt).__name__}, not token ids: give its input_ids"
        )
    if isinstance(prompt, str | bytes):
        raise DecodeError(
            f"the prompt is the text {short_repr(prompt)}; give its token ids as whole numbers: "
            "tokenizer(text).input_ids"
        )
    if isinstance(prompt, Tensor):
        if prompt.ndim not in (1, 2):
            raise DecodeError(
                f"input_ids has shape {tuple(prompt.shape)}; one request is one sequence, [T] or "
                "[1, T]"
            )
        if prompt.ndim == 2 and len(prompt) != 1:
            raise DecodeError(
                f"input_ids holds {len(prompt)} sequences; one request is one sequence"
            )
        if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise DecodeError(
                f"input_ids is a tensor of {prompt.dtype}; token ids are whole numbers: make it "
                "one with .long()"
            )
        return [int(t) for t in prompt.flatten().tolist()]
    try:
        return [_as_token_id(t) for t in prompt]
    except TypeError:
        raise DecodeError(
            f"the prompt is {short_repr(prompt)}; give the token ids of one sequence as whole "
            "numbers, in a list or "
            "tensor"
        ) from None


def _as_token_id(value: Any) -> int:
    """Return an integer. Raises: TypeError for other values, and for booleans."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)
