"""Answers about the model at the addresses of llama.cpp's server and of Ollama, and its tokenizer.

Programs look there for a model before they send it a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

import skipsearch
from skipsearch.errors import ModelError
from skipsearch.models.chat.chat_text import encode_text, get_chat_template
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.messages import FastList, RequestPart, Text
from skipsearch.serve.service import Service

# What a request gets that names no value, where the model's author recommends none either.
_NO_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
_NAMES = {"repetition_penalty": "repeat_penalty"}  # those of llama.cpp
Flag = Annotated[bool, Field(strict=True)]


class TokenizeRequest(RequestPart):
    """The body of a request to `/tokenize`.

    add_special: also the tokens that begin a text. with_pieces: tokens with their texts.
    parse_special: special tokens may be written in the text, as everywhere on this server.
    """

    content: Text
    add_special: Flag = False
    parse_special: Literal[True] = True
    with_pieces: Flag = False


class DetokenizeRequest(RequestPart):
    """The body of a request to `/detokenize`."""

    tokens: FastList[Annotated[int, Field(strict=True, ge=0)]]


def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    """Return the tokens of a text. Raises: APIError 400 for one that cannot be read."""
    try:
        tokens = encode_text(service.tokenizer, request.content, special=request.add_special)
    except ModelError as error:
        raise APIError(400, str(error), "content") from None
    if not request.with_pieces:
        return {"tokens": tokens}
    decode = service.tokenizer.decode
    entries = [{"id": token, "piece": str(decode([token]))} for token in tokens]
    return {"tokens": entries}


def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of tokens. Raises: APIError 400 for a token that does not exist."""
    size = service.model.spec.vocab_size
    unknown = next((token for token in request.tokens if token >= size), None)
    if unknown is not None:
        raise APIError(400, f"tokens has {str(unknown)[:20]}; ids are 0..{size - 1}", "tokens")
    return {"content": str(service.tokenizer.decode(request.tokens))}


def describe_server(service: Service) -> dict[str, Any]:
    """Return the properties of the server, as llama.cpp's `/props` has them."""
    template = get_chat_template(service.tokenizer)
    defaults = service.sampling_defaults.items()
    return {
        "default_generation_settings": {
            "n_ctx": service.context,
            "params": _NO_DEFAULTS | {_NAMES.get(name, name): value for name, value in defaults},
        },
        "total_slots": service.limits.max_num_seqs,
        "model_alias": service.name,
        "model_path": service.model.spec.id,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template or "",
        "bos_token": service.tokenizer.bos_token or "",
        "eos_token": service.tokenizer.eos_token or "",
        "build_info": f"skipsearch {skipsearch.__version__}",
    }


def list_tags(service: Service) -> dict[str, Any]:
    """Return the models, as Ollama's `/api/tags` lists them."""
    spec = service.model.spec
    details = {"format": spec.engine, "family": "", "quantization_level": spec.dtype_name}
    entry = {"name": service.name, "model": service.name, "size": 0, "digest": ""}
    return {"models": [entry | {"modified_at": "1970-01-01T00:00:00Z", "details": details}]}
