"""The prompts of a `generate` call, in all forms that `model.generate` takes, with padding on the
left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from skipsearch.decoding.validation import as_token_ids, short_repr
from skipsearch.errors import DecodeError, UnsupportedRequest


@dataclass(frozen=True)
class PaddedPrompt:
    """One prompt.

    ids: [1, T] int64, as the caller passed it.
    padding: number of tokens on the left that the model must not see.
    """

    ids: Tensor
    padding: int

    @property
    def visible_ids(self) -> list[int]:
        """The token ids without padding."""
        return self.ids[0, self.padding :].tolist()


def parse_prompts(
    model: Any, device: torch.device, input_ids: Any, inputs: Any, settings: Mapping[str, Any]
) -> list[PaddedPrompt]:
    """Return the prompts of a batch, all of one length, padding included.

    input_ids, inputs: two names for the same argument. If both are None, the prompt is
        bos_token_id, as in transformers.

    Raises: DecodeError.
    """
    if input_ids is not None and inputs is not None:
        raise DecodeError(
            "inputs and input_ids are both given, and they are two names for the prompt: give one "
            "of them"
        )
    prompt = inputs if input_ids is None else input_ids
    if prompt is None:
        bos = parse_token_ids("bos_token_id", settings.get("bos_token_id"))
        if len(bos) != 1:
            raise DecodeError(
                "there is no prompt and no bos_token_id to start from: give input_ids"
            )
        prompt = list(bos)
    rows = _split_prompts(prompt, device)
    _refuse_token_type_ids(model, settings.get("token_type_ids"))
    mask = settings.get("attention_mask")
    masks = (
        [None] * len(rows)
        if mask is None
        else _parse_attention_mask(mask, len(rows), rows[0].shape[1])
    )
    return [
        PaddedPrompt(ids, _count_padding(ids, settings, seen))
        for ids, seen in zip(rows, masks, strict=True)
    ]


def parse_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return the token ids of a setting, which is None, one id, a list or a tensor.

    Raises: DecodeError.
    """
    if isinstance(value, Tensor) and value.ndim < 2 and value.dtype in (torch.int64, torch.int32):
        value = value.flatten().tolist()
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise DecodeError(
            f"{name} is {short_repr(value)}; give a token id as a whole number, a list of them, or "
            "None"
        )
    return tuple(ids)


def _split_prompts(prompt: Any, device: torch.device) -> list[Tensor]:
    """Return each prompt as [1, T] int64. Raises: DecodeError."""
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        raise DecodeError(
            f"the prompt is a {type(prompt).__name__}, not token ids: unpack it, generate(model, "
            "**inputs)"
        )
    if isinstance(prompt, Tensor):
        device = prompt.device
    elif hasattr(prompt, "__array__"):
        prompt = torch.as_tensor(prompt)
    listed = (
        isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], list | tuple)
    )  # as tokenizers return a batch
    if listed or (isinstance(prompt, Tensor) and prompt.ndim == 2 and len(prompt) > 1):
        rows = [as_token_ids(row) for row in prompt]
        if len({len(row) for row in rows}) > 1:
            raise DecodeError(
                f"input_ids holds {len(rows)} sequences of different lengths: pad them on the "
                "left, as "
                "tokenizer(texts, padding=True, padding_side='left') does, and pass attention_mask "
                "too"
            )
        return [torch.tensor([row], dtype=torch.int64, device=device) for row in rows]
    return [torch.tensor([as_token_ids(prompt)], dtype=torch.int64, device=device)]


def _count_padding(ids: Tensor, settings: Mapping[str, Any], visible: list[bool] | None) -> int:
    """Return how many tokens on the left are hidden.

    attention_mask decides; without one, as in transformers, padding tokens are hidden.

    Raises: DecodeError if all tokens are hidden; UnsupportedRequest if a token after a visible one
    is hidden.
    """
    if visible is None:
        pad = parse_token_ids("pad_token_id", settings.get("pad_token_id"))
        if set(pad) & set(parse_token_ids("eos_token_id", settings.get("eos_token_id"))):
            return 0
        visible = [token not in pad for token in ids[0].tolist()]
        name = (
            "pad_token_id, which hides tokens where there is no attention_mask, is "
            f"{short_repr(settings.get('pad_token_id'))}, and"
        )
    else:
        name = "attention_mask"
    padding = visible.index(True) if True in visible else len(visible)
    if padding == len(visible) and visible:
        raise DecodeError(
            f"{name} hides every token of the prompt: give at least one that the model may see"
        )
    if not all(visible[padding:]):
        raise UnsupportedRequest(
            f"{name} hides a token after one that the model sees; only padding on the left is "
            "carried out: pass an "
            "attention_mask of ones, or take these tokens out of the prompt"
        )
    return padding


def _parse_attention_mask(mask: Any, batch_size: int, length: int) -> list[list[bool]]:
    """Return the attention mask of each prompt as booleans. Raises: DecodeError."""
    try:
        rows = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise DecodeError(
            f"attention_mask is {short_repr(mask)}; give ones and zeros of the prompt's shape, "
            f"{(batch_size, length)}"
        ) from None
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.shape != (batch_size, length):
        raise DecodeError(
            f"attention_mask has shape {tuple(rows.shape)} and the prompt {(batch_size, length)}: "
            "give one of the same shape"
        )
    if not bool(((rows == 0) | (rows == 1)).all()):
        raise DecodeError(
            f"attention_mask is {short_repr(rows[0].tolist())}; it holds ones, and zeros for "
            "padding"
        )
    return [[bool(seen) for seen in row] for row in rows.tolist()]


def _refuse_token_type_ids(model: Any, token_type_ids: Any) -> None:
    """Raise UnsupportedRequest for token_type_ids that would change the output.

    If the model embeds the ids (GPT-2), any ids are refused. All other models refuse only ids that
    are not all zero, because zeros, which a tokenizer returns for a single text, have no effect.
    Gemma 3 is one of these, although its forward takes the ids.
    """
    if token_type_ids is None:
        return
    try:
        zeros = not torch.as_tensor(token_type_ids).any()
    except (TypeError, ValueError, RuntimeError):
        zeros = False
    embedded = "token_type_ids" in signature(
        model.forward
    ).parameters and not model.config.model_type.startswith("gemma3")
    if embedded or not zeros:
        raise UnsupportedRequest(
            f"token_type_ids is {short_repr(token_type_ids)}, which this decoder does not carry "
            "out: leave it out, or pass fallback=True "
            "for transformers' own generate"
        )
