"""Write the reference text of a search: what the full model answers to the calibration prompts.

Texts are written in waves of prompts, in the order of the prompts, until the prompts or the time
end. Each wave is stored at once, so that a killed search, the next search and a resumed one write
no text twice. A stored text is used for the same prompt, model, machine, settings and version only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from skipsearch.core.constraint import Constraint
from skipsearch.core.files import cache_dir, hash_facts, make_private_dir
from skipsearch.core.machine import describe_machine, software_versions
from skipsearch.decoding.repetition import EndOnRepeat
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.generate_together import (
    Continuation,
    continue_in_turn,
    generate_continuations,
    prompts_per_pass,
)

MIN_TEXTS = 16  # by default, are written even if they take longer than the limit
FORMAT = "reference text 2"  # if what a text depends on changes, stored texts are not read


@dataclass(frozen=True)
class TextSettings:
    """How the full model continues the prompts."""

    max_new_tokens: int
    end_on_repeat: EndOnRepeat
    sampling: SamplingParams = GREEDY
    seed: int = 0  # prompt i is continued with seed + i
    constraint: Constraint | None = None


class TextStore:
    """The stored texts of one model with one setting, a line of JSON for each.

    sampled: whether a text depends on its seed.
    """

    def __init__(self, path: Path, sampled: bool = False):
        self.path, self.sampled = path, sampled
        self._texts = dict(_read_lines(path))  # (tokens, seconds) by key

    @classmethod
    def open_for(cls, model: ModelAdapter, settings: TextSettings) -> TextStore | None:
        """Open the store in the cache folder; None if the model was not loaded from files."""
        spec = model.spec
        if spec.weights_sha256 is None:
            return None
        facts = {
            "format": FORMAT,
            "model": spec.facts(),
            "engine": spec.engine,
            "eos": spec.eos_token_ids,
            "machine": asdict(describe_machine(spec.device)),
            "software": software_versions(),
            "max_new_tokens": settings.max_new_tokens,
            "end_on_repeat": settings.end_on_repeat,
            "sampling": asdict(settings.sampling),
            "constraint": settings.constraint and settings.constraint.model_dump(mode="json"),
        }
        path = cache_dir() / "texts" / f"{hash_facts(facts)[:24]}.jsonl"
        return cls(path, not settings.sampling.is_greedy)

    def get(self, prompt: Sequence[int], seed: int) -> tuple[list[int], float] | None:
        """Return (text of a prompt, seconds that it took); None if it was not written yet."""
        return self._texts.get(self._key(prompt, seed))

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[list[int]],
        seed: int,
        seconds: float,
    ) -> None:
        """Store the texts of prompts; prompt i has seed + i. A cache that is full keeps nothing.

        seconds: that one of them took.
        """
        lines = [
            json.dumps(
                {
                    "prompt": self._key(prompt, seed + i),
                    "tokens": text,
                    "seconds": round(seconds, 3),
                }
            )
            + "\n"
            for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        with suppress(OSError):
            make_private_dir(self.path.parent)
            with self.path.open("a") as file:
                # A line that a killed process left half written must not swallow the next one.
                file.write("\n" + "".join(lines))

    def _key(self, prompt: Sequence[int], seed: int) -> str:
        return hash_facts([seed if self.sampled else 0, list(prompt)])[:32]


def _read_lines(path: Path) -> list[tuple[str, tuple[list[int], float]]]:
    """Read the texts of a file, without lines that are damaged."""
    texts = list[tuple[str, tuple[list[int], float]]]()
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return texts
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            tokens = entry["tokens"]
            if tokens and all(type(token) is int and token >= 0 for token in tokens):
                texts.append((str(entry["prompt"]), (tokens, float(entry["seconds"]))))
    return texts


def write_reference_text(
    model: ModelAdapter,
    prompt_ids: Sequence[Sequence[int]],
    settings: TextSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
    store: TextStore | None = None,
    limit_s: float | None = None,
    max_kv_bytes: float = 0,
    min_texts: int = MIN_TEXTS,
    keep_states: bool = False,
) -> list[Continuation]:
    """Return the continuations of the first prompts: of all of them, if the time suffices.

    store: texts that are known already, and where new ones are kept. limit_s: seconds. No wave
    begins of which more than half would come later, by the time of the one before, but min_texts
    texts are written in any case. The time that stored texts took counts, so that a resumed search
    has the texts of the first one. max_kv_bytes: memory for the K/V of texts that are written here.
    keep_states: keep the states of these, see `Continuation`.
    progress(tokens done, tokens that may be generated).
    """
    generate = generate_continuations if model.spec.ragged_batches else continue_in_turn
    wave = min(min_texts, prompts_per_pass(model)) if model.spec.ragged_batches else 1
    spent_s, wave_s, total = 0.0, 0.0, len(prompt_ids) * settings.max_new_tokens
    continuations = list[Continuation]()
    while len(continuations) < len(prompt_ids):
        begin = len(continuations)
        seed = settings.seed + begin
        stored = None if store is None else store.get(prompt_ids[begin], seed)
        if stored is not None:
            continuations.append(Continuation(stored[0]))
            spent_s, wave_s = spent_s + stored[1], wave * stored[1]
            continue
        is_over_time = limit_s is not None and spent_s + wave_s / 2 > limit_s
        if is_over_time and begin >= min_texts:
            break
        prompts = [prompt_ids[begin]]
        for i, prompt in enumerate(prompt_ids[begin + 1 : begin + wave], begin + 1):
            if store is not None and store.get(prompt, settings.seed + i) is not None:
                break
            prompts.append(prompt)
        before = begin * settings.max_new_tokens
        started = perf_counter()
        written = generate(
            model,
            prompts,
            settings.max_new_tokens,
            settings.end_on_repeat,
            lambda done, _, before=before: progress(before + done, total),  # type: ignore[misc]
            settings.sampling,
            seed,
            settings.constraint,
            max_kv_bytes=max_kv_bytes,
            keep_states=keep_states,
        )
        max_kv_bytes -= sum(text.kv.nbytes for text in written if text.kv is not None)
        wave_s = perf_counter() - started
        spent_s += wave_s
        if store is not None:
            store.add(prompts, [text.tokens for text in written], seed, wave_s / len(prompts))
        continuations += written
    progress(total, total)  # some texts may be stored, or left out
    return continuations
