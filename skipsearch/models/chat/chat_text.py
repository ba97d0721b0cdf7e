"""Encode text as token ids: a plain prompt, or a conversation in the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipsearch.errors import ModelError
from skipsearch.models.chat.template_sandbox import get_renderer
from skipsearch.models.loading.stored_tokenizer import StoredTokenizer
from skipsearch.models.third_party import first_line_of, panics_as_errors

ToolSchemas = Sequence[Mapping[str, Any]] | None


def get_chat_template(tokenizer: Any, tools: ToolSchemas = None) -> str | None:
    """Return the chat template (Jinja) of a model; None for a model without one (a base model).

    tools: select the template named `tool_use` if the model has several. Raises: ModelError if none
    of several templates is the default, or a template is not text.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template = (
            tokenizer.get_chat_template()
            if tools is None
            else tokenizer.get_chat_template(tools=list(tools))
        )
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the chat templates in {tokenizer.name_or_path} leave open which one is meant "
            f"({first_line_of(error)}): name one default"
        ) from None
    if not isinstance(template, str):
        raise ModelError(
            f"the chat template in {tokenizer.name_or_path} is a {type(template).__name__}: write "
            "it as text, or remove it"
        )
    return template


def prepare_renderer(tokenizer: Any) -> None:
    """Start what renders the chat template, if there is one, so that the first request need not
    wait for it.
    """
    if getattr(tokenizer, "chat_template", None) and not _has_custom_chat_code(tokenizer):
        get_renderer().prepare()


def render_user_turn(tokenizer: Any, text: str) -> str:
    """Render `text` in the chat template as the only user turn, up to the beginning of the answer.

    Raises: ModelError, as `render_chat` does.
    """
    return render_chat(tokenizer, [{"role": "user", "content": text}], "a single request")


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    messages_noun: str = "this conversation",
    tools: ToolSchemas = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation in the chat template, up to the beginning of the model's answer.

    messages: role and content of each turn. messages_noun: their name in errors. tools: JSON
    schemas, as for transformers' `apply_chat_template`. variables: others that the template may
    read, such as `enable_thinking`. With `add_generation_prompt` False the text ends before the
    beginning of the answer; with `continue_final_message` True, too, it ends with the last message.

    Raises: ModelError if the template rejects them, or takes too long or too much memory."""
    way_out = "mend it, or remove it to give the model its prompts as they are"
    try:
        if _has_custom_chat_code(tokenizer):
            options = {"add_generation_prompt": True} | dict(variables or {})
            options |= {} if tools is None else {"tools": list(tools)}
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        template = get_chat_template(tokenizer, tools) or ""
        turns = replace_unknown_roles(template, messages)
        return get_renderer().render(
            template, tokenizer.special_tokens_map, turns, tools, variables
        )
    except ModelError:
        raise
    except TimeoutError as error:
        raise ModelError(
            f"the chat template in {tokenizer.name_or_path} {error}, and was stopped: {way_out}"
        ) from None
    except Exception as error:
        raise ModelError(
            f"the chat template in {tokenizer.name_or_path} cannot take {messages_noun} "
            f"({first_line_of(error)}): {way_out}"
        ) from None


def replace_unknown_roles(
    template: str, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the messages with the role `system` instead of `developer`, OpenAI's newer name for
    it, unless the template names that role.
    """
    if "developer" in template:
        return list(messages)
    return [
        {**turn, "role": "system"} if turn.get("role") == "developer" else turn for turn in messages
    ]


def _has_custom_chat_code(tokenizer: Any) -> bool:
    """Return whether the tokenizer's class renders chats by code of its own, without a template."""
    if isinstance(tokenizer, StoredTokenizer):
        return False
    from transformers import PreTrainedTokenizerBase

    return (
        getattr(type(tokenizer), "apply_chat_template", None)
        is not PreTrainedTokenizerBase.apply_chat_template
    )


def encode_prompt(
    tokenizer: Any, text: str, *, chat: bool = False, max_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a prompt, special tokens included.

    chat: render the text in the chat template, which adds its own special tokens. max_tokens: a
    longer prompt loses the beginning of its text, but not of the template."""
    ids = _encode_rendered(tokenizer, text, chat)
    while max_tokens is not None and len(ids) > max_tokens:
        end_ids = encode_text(tokenizer, text, special=False)[len(ids) - max_tokens :]
        if not end_ids:
            return ids[-max_tokens:]  # the template alone is too long
        end_text = tokenizer.decode(end_ids, clean_up_tokenization_spaces=False)
        end_text = end_text.lstrip("\N{REPLACEMENT CHARACTER}")  # part of a split character
        # Shorten the text in each step: some tokenizers do not decode to the text that they
        # encoded.
        text = end_text[max(0, len(end_text) - len(text) + 1) :]
        ids = _encode_rendered(tokenizer, text, chat)
    return ids


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: ToolSchemas = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation in the chat template. tools, variables: as for
    `render_chat`.

    Raises: ModelError, also if the model has no template."""
    if get_chat_template(tokenizer) is None:
        raise ModelError(
            f"the model in {tokenizer.name_or_path} has no chat template, so nothing says how it "
            "reads a conversation: give it a plain prompt"
        )
    text = render_chat(tokenizer, messages, tools=tools, variables=variables)
    return encode_text(tokenizer, text, special=False)


def find_continued_text(tokenizer: Any, ids: Sequence[int], text: str) -> str:
    """Return the last message as a prompt ends with it, without white space at its start.

    Templates may strip white space. ids: the prompt, rendered with `continue_final_message`.
    text: the message.
    """
    text = text.lstrip()
    tail = tokenizer.decode(  # a token is at least a byte
        list(ids)[-len(text.encode("utf-8", "replace")) - 1 :], clean_up_tokenization_spaces=False
    )
    return text if tail.endswith(text) else text.rstrip()


def _encode_rendered(tokenizer: Any, text: str, chat: bool) -> list[int]:
    prompt = render_user_turn(tokenizer, text) if chat else text
    return encode_text(tokenizer, prompt, special=not chat)


def encode_text(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return the token ids of a text. special: also the tokens that begin or end a text.

    Raises: ModelError for a text that the tokenizer cannot read."""
    _refuse_surrogates(text)
    try:
        with panics_as_errors():
            if isinstance(tokenizer, StoredTokenizer):
                return tokenizer.encode_ids(text, special)
            return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except ValueError as error:  # catastrophic backtracking of a pattern, an unknown special token
        raise ModelError(
            f"the tokenizer in {tokenizer.name_or_path} cannot read a text of {len(text)} "
            f"characters ({first_line_of(error)}): "
            "take the tokenizer.json of the original model, or leave that text out"
        ) from None


def _refuse_surrogates(text: str) -> None:
    """Raise ModelError for a lone surrogate, which no tokenizer reads.

    Python turns bytes that are not UTF-8 into lone surrogates.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = (
            f"the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
            if 0xDC80 <= code < 0xDD00
            else f"U+{code:04X}, half of a character"
        )
        raise ModelError(
            f"the text has {problem}, at position {error.start}: "
            "write it in UTF-8, or leave that out"
        ) from None
