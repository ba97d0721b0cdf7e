"""Text to token ids: a prompt as it is, or put into a chat model's own template as the one turn of a user."""

from __future__ import annotations

from typing import Any

from skipsearch.errors import ModelError


def chat_template(tokenizer: Any) -> str | None:
    """The template (Jinja) that requests to a chat model are put into; None for a base model, which has none."""
    return tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else None


def as_request(tokenizer: Any, text: str) -> str:
    """`text` in the chat template, up to where the model's answer begins. Raises: ModelError for a template that refuses it."""
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program: it fails in Jinja's ways, in Python's, and by its own raise_exception
        reason = " ".join(str(error).split())[:200].rstrip(".: ") or type(error).__name__
        raise ModelError(f"the chat template in {tokenizer.name_or_path} cannot take a single request ({reason}): mend it, or remove it "
                         "to give the model its prompts as they are") from None


def token_ids(tokenizer: Any, text: str, *, chat: bool = False, most: int | None = None) -> list[int]:
    """Token ids of a prompt, special tokens included. chat: it goes through the chat template, which brings its own.

    most: a longer prompt loses the beginning of its text, so that what it asks and what the model expects around it stay.
    """
    ids = _whole(tokenizer, text, chat)
    while most is not None and len(ids) > most:
        kept = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][len(ids) - most:]
        if not kept:
            return ids[-most:]  # what stands around the text is too long by itself
        left = tokenizer.decode(kept, clean_up_tokenization_spaces=False).lstrip("\N{REPLACEMENT CHARACTER}")  # of a character cut in two
        text = left[max(0, len(left) - len(text) + 1):]  # shorter in any case, for tokenizers that do not decode what they read
        ids = _whole(tokenizer, text, chat)
    return ids


def _whole(tokenizer: Any, text: str, chat: bool) -> list[int]:
    given = as_request(tokenizer, text) if chat else text
    return list(tokenizer(given, add_special_tokens=not chat, verbose=False)["input_ids"])
