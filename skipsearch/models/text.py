"""Text to token ids: a prompt as it is, or a conversation put into a chat model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipsearch.errors import ModelError
from skipsearch.models.rendering import renderer
from skipsearch.models.telling import in_short, no_panic

Tools = Sequence[Mapping[str, Any]] | None


def chat_template(tokenizer: Any, tools: Tools = None) -> str | None:
    """The template (Jinja) that requests to a chat model are put into; None for a base model, which has none.

    tools: where they are given, a model with several templates is asked for the one that is called `tool_use`.

    Raises: ModelError for several templates of which none is the default, and for what is no text.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template = tokenizer.get_chat_template() if tools is None else tokenizer.get_chat_template(tools=list(tools))
    except (ValueError, TypeError) as error:
        raise ModelError(f"the chat templates in {tokenizer.name_or_path} leave open which one is meant ({in_short(error)}): name one "
                         "default") from None
    if not isinstance(template, str):
        raise ModelError(f"the chat template in {tokenizer.name_or_path} is a {type(template).__name__}: write it as text, or remove it")
    return template


def as_request(tokenizer: Any, text: str) -> str:
    """`text` in the chat template as the one turn of a user, up to where the model's answer begins. Raises: as `as_conversation`."""
    return as_conversation(tokenizer, [{"role": "user", "content": text}], "a single request")


def as_conversation(tokenizer: Any, messages: Sequence[Mapping[str, Any]], what: str = "this conversation", tools: Tools = None) -> str:
    """messages: role and content of each turn, in the chat template, up to where the model's answer begins.

    what: what the messages are, in an error. tools: as transformers' `apply_chat_template` has them, JSON schemas.

    Raises: ModelError for a template that refuses them, or takes too long or too much memory for them."""
    way_out = "mend it, or remove it to give the model its prompts as they are"
    try:
        if _own_way(tokenizer):
            more = {} if tools is None else {"tools": list(tools)}
            return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **more))
        return renderer().render(chat_template(tokenizer, tools) or "", tokenizer.special_tokens_map, messages, tools)
    except ModelError:
        raise
    except TimeoutError as error:
        raise ModelError(f"the chat template in {tokenizer.name_or_path} {error}, and was stopped: {way_out}") from None
    except Exception as error:
        raise ModelError(f"the chat template in {tokenizer.name_or_path} cannot take {what} ({in_short(error)}): "
                         f"{way_out}") from None


def _own_way(tokenizer: Any) -> bool:
    """Whether its class has code of its own for chats, which is not the model's: no template is run then."""
    from transformers import PreTrainedTokenizerBase

    return getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template


def token_ids(tokenizer: Any, text: str, *, chat: bool = False, most: int | None = None) -> list[int]:
    """Token ids of a prompt, special tokens included. chat: it goes through the chat template, which brings its own.

    most: a longer prompt loses the beginning of its text, so that what it asks and what the model expects around it stay.
    """
    ids = _whole(tokenizer, text, chat)
    while most is not None and len(ids) > most:
        kept = _encoded(tokenizer, text, special=False)[len(ids) - most:]
        if not kept:
            return ids[-most:]  # what stands around the text is too long by itself
        left = tokenizer.decode(kept, clean_up_tokenization_spaces=False).lstrip("\N{REPLACEMENT CHARACTER}")  # of a character cut in two
        text = left[max(0, len(left) - len(text) + 1):]  # shorter in any case, for tokenizers that do not decode what they read
        ids = _whole(tokenizer, text, chat)
    return ids


def conversation_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> list[int]:
    """Token ids of a conversation in the chat template. tools: as of `as_conversation`.

    Raises: ModelError, also for a model that has no template."""
    if chat_template(tokenizer) is None:
        raise ModelError(f"the model in {tokenizer.name_or_path} has no chat template, so nothing says how it reads a conversation: give "
                         "it a plain prompt")
    return _encoded(tokenizer, as_conversation(tokenizer, messages, tools=tools), special=False)


def _whole(tokenizer: Any, text: str, chat: bool) -> list[int]:
    return _encoded(tokenizer, as_request(tokenizer, text) if chat else text, special=not chat)


def _encoded(tokenizer: Any, text: str, special: bool) -> list[int]:
    try:
        with no_panic():
            return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except ValueError as error:  # a pattern that backtracks without end, an unknown special token, a lone surrogate
        raise ModelError(f"the tokenizer in {tokenizer.name_or_path} cannot read a text of {len(text)} characters ({in_short(error)}): "
                         "take the tokenizer.json of the original model, or leave that text out") from None
