"""A conversation with a model: its turns, streamed answers, and statistics of their decoding.

If the model has a chat template, the template renders the turns. A model without one (a base model)
continues the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from skipsearch.core.sizes import format_tokens_per_s
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Chunk, Decoder, Request
from skipsearch.decoding.request import RequestOptions
from skipsearch.errors import DecodeError, ModelError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.chat.chat_text import encode_chat, encode_prompt, get_chat_template
from skipsearch.profile import Profile
from skipsearch.profile.show import format_counts, format_speedup


class Conversation:
    """A conversation, whose `turns` have a role and a content each.

    For a base model, the text is the turns in order, each question on a separate line.

    make_decoder: makes the decoder for a model and a profile. Raises: ModelError for a model
    without a tokenizer; ProfileError for a profile of another model.
    """

    def __init__(
        self,
        model: ModelAdapter,
        profile: Profile | None = None,
        system: str | None = None,
        max_new_tokens: int = 512,
        settings: RequestOptions | None = None,
        make_decoder: Callable[[ModelAdapter, Profile | None], Decoder] = Decoder,
    ):
        if model.tokenizer is None:
            raise ModelError(
                f"{model.spec.id} has no tokenizer, so it takes token ids only: use "
                "Decoder.generate from Python"
            )
        self.model, self.max_new_tokens, self.system, self.settings = (
            model,
            max_new_tokens,
            system,
            settings or {},
        )
        self._make_decoder = make_decoder
        self.is_chat = get_chat_template(model.tokenizer) is not None
        if system is not None and not self.is_chat:
            raise ModelError(
                f"{model.spec.id} has no chat template, so it takes no system prompt: begin the "
                "text with it instead"
            )
        self.turns: list[dict[str, str]] = []
        self.last_stats: DecodeStats | None = None
        self.use_profile(profile)
        self.reset()

    def use_profile(self, profile: Profile | None) -> list[str]:
        """Decode with another profile from now on, plainly if None; return the profile's warnings.

        Before the next answer, the whole conversation is prefilled again.
        """
        decoder = self._make_decoder(self.model, profile)
        self.profile, self.session, self.last_stats = profile, decoder.new_session(), None
        self.decoder: Decoder = decoder
        return decoder.warnings

    def reset(self) -> None:
        """Delete all turns except the system prompt."""
        self.turns = [{"role": "system", "content": self.system}] if self.system is not None else []

    def send(self, text: str) -> Iterator[str]:
        """Stream the answer to `text`. If the caller stops reading, the answer ends.

        Raises: DecodeError if the conversation is too long for an answer; the turns then do not
        change.
        """
        previous_turns = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            chunks = self.session.stream(
                Request(self._prompt_ids(), self.max_new_tokens, **self.settings)
            )
        except (DecodeError, ModelError) as error:
            self.turns = previous_turns
            raise type(error)(f"{error} (/reset forgets what was said)") from None
        answer = {"role": "assistant", "content": ""}
        self.turns.append(answer)
        self.last_stats = None
        return self._stream_reply(chunks, answer)

    def _stream_reply(self, chunks: Iterator[Chunk], answer: dict[str, str]) -> Iterator[str]:
        with closing(chunks):  # type: ignore[type-var]
            for chunk in chunks:
                answer["content"] += chunk.text or ""
                self.last_stats = chunk.stats or self.last_stats
                yield chunk.text or ""

    def _prompt_ids(self) -> list[int]:
        if self.is_chat:
            return encode_chat(self.model.tokenizer, self.turns)
        return encode_prompt(self.model.tokenizer, self._base_model_text())

    def _base_model_text(self) -> str:
        """Join the turns into the text that a base model continues."""
        text = ""
        for turn in self.turns:
            new_line = turn["role"] == "user" and text and not text.endswith("\n")
            text += f"\n{turn['content']}" if new_line else turn["content"]
        return text

    def save(self, path: Path) -> None:
        """Write the turns to a new file as one line of JSON, as `decode --prompts` reads it.

        Raises: OSError, also if the file exists.
        """
        line = json.dumps(
            {"messages": self.turns} if self.is_chat else {"prompt": self._base_model_text()},
            ensure_ascii=False,
        )
        with path.open("x", encoding="utf-8") as file:
            file.write(line + "\n")

    def describe_last(self) -> list[str]:
        """Return sentences on the last answer's statistics and on the profile's claim."""
        lines = [
            "decoding with no profile: plainly"
            if self.profile is None
            else f"decoding with a profile for {self.profile.task.name}, which claims "
            f"{format_speedup(self.profile)} of plain decoding's speed"
        ]
        if self.last_stats is None:
            return [*lines, "no answer was read to its end yet"]
        stats, pace = self.last_stats, self.last_stats.seconds_per_token
        words = [
            f"{stats.tokens} tokens after a prompt of {stats.prompt_tokens}, of which "
            f"{stats.cached_tokens} were cached",
            f"first token after {stats.prefill_seconds:.2f} s",
        ]
        if pace:
            words.append(f"then {format_tokens_per_s(1 / pace)} tokens/s, τ {stats.tau:.2f}")
        if stats.alpha is not None:
            words.append(f"α {stats.alpha:.2f}")
        kinds = (spec.kind for spec in self.decoder.recipe.drafters)
        return [
            *lines,
            f"last answer: {', '.join(words)}",
            *(
                f"{kind}: {format_counts(counts)}"
                for kind, counts in zip(kinds, stats.by_drafter, strict=False)
            ),
        ]
