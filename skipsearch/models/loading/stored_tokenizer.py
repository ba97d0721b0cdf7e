"""A tokenizer that is made of what a load stored, without transformers, whose import takes a
second.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from skipsearch.models.loading.gguf_tokenizer import SPECIAL_TOKENS, wrap_tokenizer


class TokenizerParts(NamedTuple):
    """What a tokenizer of a GGUF file is made of."""

    name: str  # of the file
    backend: str  # JSON of the library tokenizers
    settings: dict[str, Any]  # of transformers' tokenizer


def take_apart(tokenizer: Any) -> TokenizerParts:
    """Return the parts of a tokenizer that `read_tokenizer` returned."""
    settings = {
        "chat_template": tokenizer.chat_template,
        "add_bos_token": tokenizer.add_bos_token,
        "add_eos_token": tokenizer.add_eos_token,
        **tokenizer.special_tokens_map,
    }
    backend = tokenizer.backend_tokenizer.to_str()
    return TokenizerParts(tokenizer.name_or_path, backend, settings)


class StoredTokenizer:
    """A tokenizer that encodes and decodes as transformers' tokenizer of the same parts does.

    What else that one has, it has, too: the first use of it, or a change, imports transformers.
    From then on, that tokenizer answers everything.
    """

    def __init__(self, parts: TokenizerParts):
        name, backend, settings = parts
        vars(self).update(
            name_or_path=name, backend=Tokenizer.from_str(backend), settings=dict(settings)
        )

    @cached_property
    def full(self) -> Any:
        """The tokenizer of transformers, which shares the vocabulary."""
        return wrap_tokenizer(self.backend, self.settings, self.name_or_path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols, such as that of copies
            raise AttributeError(name)
        return getattr(self.full, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.full, name, value)

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Encode as transformers does, with all of its options."""
        return self.full(*arguments, **options)

    def encode_ids(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text. special: also those that begin or end a text."""
        if "full" in vars(self):  # its calls may leave a truncation or a padding
            return list(self.full(text, add_special_tokens=special, verbose=False)["input_ids"])
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of tokens."""
        is_plain = isinstance(token_ids, list) and all(type(token) is int for token in token_ids)
        if is_plain and not any(options.values()):
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    @property
    def chat_template(self) -> Any:
        """The chat template; None: there is none."""
        return self._read("chat_template")

    @property
    def bos_token(self) -> Any:
        """The token that begins a text; None: there is none."""
        return self._read("bos_token")

    @property
    def eos_token(self) -> Any:
        """The token that ends a text; None: there is none."""
        return self._read("eos_token")

    @property
    def response_template(self) -> Any:
        """How answers are read; None: no file says so."""
        return self._read("response_template")

    def _read(self, setting: str) -> Any:
        """Return a setting of the tokenizer of transformers."""
        if "full" in vars(self):
            return getattr(self.full, setting, None)
        return self.settings.get(setting)

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> Any:
        """Return the chat template. Raises: ValueError if there is none."""
        if chat_template is None and isinstance(self.chat_template, str):
            return self.chat_template
        return self.full.get_chat_template(chat_template, tools)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens by name, such as `bos_token`."""
        if "full" in vars(self):
            return dict(self.full.special_tokens_map)
        names = [f"{name}_token" for name in SPECIAL_TOKENS]
        return {name: self.settings[name] for name in names if name in self.settings}

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that stay whole in a text, by id."""
        return dict(self.backend.get_added_tokens_decoder())

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of the tokens that stay whole in a text."""
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}
