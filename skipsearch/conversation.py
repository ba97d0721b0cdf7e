"""A conversation with a model: turns that grow, answers that stream, figures of how they were decoded.

A model with a chat template gets every turn through it. A base model, which has none, goes on from the text so far.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from skipsearch.decoding import Chunk, Decoder, Request
from skipsearch.decoding.request import Settings
from skipsearch.errors import DecodeError, ModelError
from skipsearch.models.spec import ModelAdapter
from skipsearch.models.text import chat_template, conversation_ids, token_ids
from skipsearch.profile import Profile
from skipsearch.profile.describe import speedup
from skipsearch.stats import DecodeStats


class Conversation:
    """turns: role and content of each. A base model's text is what its turns say, one after the other, each question on a line of its own.

    decoder_of: makes what decodes with a profile, where that is more than `Decoder`.
    Raises: ModelError for a model without a tokenizer; ProfileError for a profile of another model.
    """

    def __init__(self, model: ModelAdapter, profile: Profile | None = None, system: str | None = None, max_new_tokens: int = 512,
                 settings: Settings | None = None, decoder_of: Callable[[ModelAdapter, Profile | None], Decoder] = Decoder):
        if model.tokenizer is None:
            raise ModelError(f"{model.spec.id} has no tokenizer, so it takes token ids only: use Decoder.generate from Python")
        self.model, self.max_new_tokens, self.system, self.settings = model, max_new_tokens, system, settings or {}
        self._decoder_of = decoder_of
        self.is_chat = chat_template(model.tokenizer) is not None
        if system is not None and not self.is_chat:
            raise ModelError(f"{model.spec.id} has no chat template, so it takes no system prompt: begin the text with it instead")
        self.turns: list[dict[str, str]] = []
        self.last: DecodeStats | None = None
        self.choose(profile)
        self.reset()

    def choose(self, profile: Profile | None) -> list[str]:
        """Decode with this profile from now on; None: plainly. Returns warnings. The conversation so far is read again, once."""
        decoder = self._decoder_of(self.model, profile)
        self.profile, self.session, self.last = profile, decoder.session(), None
        self.decoder: Decoder = decoder
        return decoder.warnings

    def reset(self) -> None:
        """Forget what was said."""
        self.turns = [{"role": "system", "content": self.system}] if self.system is not None else []

    def ask(self, text: str) -> Iterator[str]:
        """The answer to `text`, piece by piece. If the caller stops reading, what was read stays as the answer.

        Raises: DecodeError where the conversation leaves no room for an answer; it then stands as it did before.
        """
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            chunks = self.session.stream(Request(self._prompt(), self.max_new_tokens, **self.settings))
        except (DecodeError, ModelError) as error:
            self.turns = before
            raise type(error)(f"{error} (/reset forgets what was said)") from None
        answer = {"role": "assistant", "content": ""}
        self.turns.append(answer)
        self.last = None
        return self._read(chunks, answer)

    def _read(self, chunks: Iterator[Chunk], answer: dict[str, str]) -> Iterator[str]:
        with closing(chunks):  # type: ignore[type-var]
            for chunk in chunks:
                answer["content"] += chunk.text or ""
                self.last = chunk.stats or self.last
                yield chunk.text or ""

    def _prompt(self) -> list[int]:
        if self.is_chat:
            return conversation_ids(self.model.tokenizer, self.turns)
        return token_ids(self.model.tokenizer, self._text())

    def _text(self) -> str:
        """What a base model goes on from: what was asked stands on a line of its own, behind the answers so far."""
        text = ""
        for turn in self.turns:
            behind = turn["role"] == "user" and text and not text.endswith("\n")
            text += f"\n{turn['content']}" if behind else turn["content"]
        return text

    def save(self, path: Path) -> None:
        """Write the turns as one line of JSON, as `decode --prompts` reads it; nothing is replaced. Raises: OSError."""
        line = json.dumps({"messages": self.turns} if self.is_chat else {"prompt": self._text()},
                          ensure_ascii=False)
        with path.open("x", encoding="utf-8") as file:
            file.write(line + "\n")

    def figures(self) -> list[str]:
        """What the last answer took, and what the profile claims, in words."""
        lines = ["decoding with no profile: plainly" if self.profile is None else
                 f"decoding with a profile for {self.profile.task.name}, which claims {speedup(self.profile)} of plain decoding's speed"]
        if self.last is None:
            return [*lines, "no answer was read to its end yet"]
        stats, pace = self.last, self.last.seconds_per_token
        words = [f"{stats.tokens} tokens behind a prompt of {stats.prompt_tokens}, of which {stats.cached_tokens} were known",
                 f"first token after {stats.prefill_seconds:.2f} s"]
        if pace:
            words.append(f"then {1 / pace:.0f} tokens/s, τ {stats.tau:.2f}")
        if stats.alpha is not None:
            words.append(f"α {stats.alpha:.2f}")
        return [*lines, f"last answer: {', '.join(words)}"]


