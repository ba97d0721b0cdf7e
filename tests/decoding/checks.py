"""Checks of lossless decoding: of greedy text and of its end. They raise AssertionError.

The test files of this folder call them on many cases. The planted bugs must make them fail on the
few default cases. The expected text is computed without skipsearch, by Hugging Face's own forward
over the whole text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny import LAYERS, FullModel, tiny_model_and_reference, with_eos, with_tokenizer

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL, Reading, Vocabulary
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats, DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.native.structs import PANEL_ROWS
from skipsearch.models import ModelAdapter
from skipsearch.models.head_rows import fill_up
from skipsearch.models.kv_cache import PassPlan, Planner

MASKS = (
    SkipMask(LAYERS, (1, 3), (2,)),
    SkipMask(LAYERS, (0,), (0, 4)),
    SkipMask(LAYERS, (2, 3)),
    SkipMask(LAYERS, mlp=(1, 2)),
)
PROMPTS = (
    (5, 17, 40, 3),
    (0,),
    (60, 2, 2, 31, 8, 44, 21, 13, 7),
    (33, 34),
)  # as text, what follows (0,) has split characters


FEW_TOKENS = Vocabulary(lowest=5, tokens="9 12-20 33 50-60")


def restrict_logits(
    logits: torch.Tensor, model: ModelAdapter, vocabulary: Vocabulary | None, history: Sequence[int]
) -> torch.Tensor:
    """Return logits [..., V] of a draft that knows a vocabulary and the tokens of a text only."""
    if vocabulary is None:
        return logits
    multiple = PANEL_ROWS if isinstance(model, NativeAdapter) else 1
    known = fill_up(vocabulary.token_ids(), model.spec.vocab_size, multiple)
    is_unknown = torch.ones(logits.shape[-1], dtype=torch.bool)
    is_unknown[[*known, *history]] = False
    return logits.masked_fill(is_unknown, float("-inf"))


# --- greedy


@dataclass(frozen=True)
class Drafting:
    """How a decoder drafts.

    mask: of its skip drafter; None: it has none. lookup: the drafter before it. guarded: drafters
    that gain little rest, here after a round or two. siblings: what the skip drafter proposes in
    addition to its chain. reading: what a pass of the skip drafter reads.
    """

    mask: SkipMask | None = MASKS[0]
    draft_length: int = 4
    exit: str = "fixed"
    parameters: dict[str, float] = field(default_factory=dict)
    lookup: Lookup | None = None
    guarded: bool = False
    siblings: Siblings | None = None
    reading: Reading = READ_ALL

    @property
    def recipe(self) -> Recipe:
        skip = (
            []
            if self.mask is None
            else [
                Skip.from_mask(
                    self.mask,
                    self.draft_length,
                    make_exit(self.exit, **self.parameters),
                    self.siblings,
                    self.reading,
                )
            ]
        )
        return Recipe((*([] if self.lookup is None else [self.lookup]), *skip))

    def decoder(self, model: ModelAdapter) -> Decoder:
        prices = (
            [
                DrafterCost(0.4 * (spec.kind == "skip"), 1.2, 3.0, 0.1)
                for spec in self.recipe.drafters
            ]
            if self.guarded
            else ()
        )
        return Decoder(model, self.recipe, drafter_costs=prices)


DRAFTINGS = (
    Drafting(),
    Drafting(MASKS[1], 1),
    Drafting(MASKS[2], 12, "confidence", {"threshold": 0.3}),
    Drafting(
        MASKS[3],
        7,
        "adaptive",
        {"threshold": 0.4, "target_acceptance": 0.7, "step": 0.5, "beta2": 0.1},
    ),
    Drafting(None, lookup=Lookup(min_match=1, draft_length=6)),
    Drafting(MASKS[0], 3, lookup=Lookup(min_match=1, draft_length=4, per_match=2), guarded=True),
    Drafting(MASKS[2], 5, siblings=Siblings(below=0.6, most=2)),
    Drafting(SkipMask(LAYERS), 4, reading=Reading("int4")),
    Drafting(SkipMask(LAYERS), 5, reading=Reading(vocabulary=FEW_TOKENS)),
    Drafting(
        MASKS[0],
        6,
        "confidence",
        {"threshold": 0.2},
        siblings=Siblings(below=0.7, most=2),
        reading=Reading("int5", FEW_TOKENS),
    ),
)
REQUESTS = ((PROMPTS[0], 24), (PROMPTS[1], 3), (PROMPTS[2], 20), (PROMPTS[3], 12))


def check_greedy(
    draftings: Sequence[Drafting] = DRAFTINGS,
    requests: Sequence[tuple[tuple[int, ...], int]] = REQUESTS,
    world: tuple[ModelAdapter, FullModel] | None = None,
) -> DecodeStats:
    """Check that several requests on one decoder, one after the other, get the right tokens.

    Each has exactly as many tokens as its limit.
    """
    model, full = world or tiny_model_and_reference()
    total = DecodeStats()
    for drafting in draftings:
        decoder = drafting.decoder(model)
        for prompt, n in requests:
            result = decoder.generate(prompt, max_new_tokens=n)
            assert result.tokens == full.greedy(prompt, n), (drafting, prompt, n)
            assert result.finish_reason == "length"
            total += result.stats
    return total


@contextmanager
def padded_passes() -> Iterator[None]:
    """Plant no bug, but passes as those of an engine with fixed shapes.

    A pass sees a multiple of 64 slots, with a mask over the hidden ones.
    """

    def chain(self: Planner, start: int, tokens: int, batch: int = 1) -> PassPlan:
        slots = self.list_slots(start + tokens)[:, start:].expand(batch, tokens)
        keys = -(-(start + tokens) // 64) * 64
        visible = (self.list_slots(keys) <= slots[0][:, None])[None, None]
        return PassPlan(slots, slots, keys, visible, start)

    with patch.object(Planner, "plan_chain", chain):
        yield


def check_streams_side_by_side() -> None:
    """Check that two streams of one decoder, read in turns, get the full model's own tokens."""
    model, full = tiny_model_and_reference()
    decoder = DRAFTINGS[0].decoder(model)
    streams = [decoder.stream(prompt, max_new_tokens=16) for prompt in PROMPTS[:2]]
    read: list[list[int]] = [[], []]
    for chunks in zip_longest(*streams):
        for tokens, chunk in zip(read, chunks, strict=True):
            tokens.extend(chunk.tokens if chunk else ())
    assert read == [full.greedy(prompt, 16) for prompt in PROMPTS[:2]]


def assert_partly_accepted(stats: DecodeStats) -> None:
    """Check that some drafted tokens were accepted and some rejected.

    Otherwise a test of losslessness proves nothing.
    """
    assert 0 < stats.accepted < stats.drafted, stats


# --- where a generation ends


@dataclass(frozen=True)
class Ending:
    """The conditions that end a generation."""

    limit: int = 16
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    end_on_repeat: int | None = None


def expected_ending(
    tokens: Sequence[int], ending: Ending, tokenizer: Any
) -> tuple[list[int], str, str]:
    """Return (tokens, finish reason, text) by the definition.

    The whole text is judged again after every token.
    """
    for n in range(1, ending.limit + 1):
        whole = tokenizer.decode(tokens[:n], skip_special_tokens=True)
        text = whole[
            : min((whole.find(s) for s in ending.stop if s in whole), default=len(whole))
        ]  # never holds a stop string
        grams = [
            tuple(tokens[i : i + size])
            for size in [ending.end_on_repeat or n + 1]
            for i in range(n - size + 1)
        ]
        if tokens[n - 1] in ending.eos:
            return list(tokens[:n]), "eos", text
        if text != whole:
            return list(tokens[:n]), "stop", text
        if grams and grams[-1] in grams[:-1]:
            return list(tokens[:n]), "repeat", text
    return list(tokens[: ending.limit]), "length", text


def endings_by_default(
    prompt: tuple[int, ...], every: int = 4
) -> list[tuple[tuple[int, ...], Ending]]:
    """Return short limits, end-of-sequence tokens, stop strings and a first repetition.

    Tokens and strings are those at every fourth position of a generation.
    """
    _, full = tiny_model_and_reference()
    tokens = full.greedy(prompt, 16)
    text = byte_tokenizer().decode(tokens, skip_special_tokens=True)
    pieces = [text[i : i + 3] for i in range(0, len(text) - 3, every)]
    return [
        *((prompt, Ending(limit)) for limit in (1, 2, 3, 7)),
        *((prompt, Ending(eos=(token, 63))) for token in dict.fromkeys(tokens[::every])),
        *((prompt, Ending(stop=(piece, "nowhere"))) for piece in pieces if "\ufffd" not in piece),
        (prompt, Ending(24, end_on_repeat=2)),
    ]


def check_endings(
    cases: Sequence[tuple[tuple[int, ...], Ending]] | None = None,
    draftings: Sequence[Drafting | None] = (None, DRAFTINGS[0]),
) -> Counter[str]:
    """Check that a generation ends as the definition says, with its reason and its text.

    It is plain or drafted, streamed or not.
    """
    model, full = tiny_model_and_reference()
    tokenizer = byte_tokenizer()
    reasons: Counter[str] = Counter()
    for prompt, ending in cases or [
        *endings_by_default(PROMPTS[0]),
        *endings_by_default(PROMPTS[1]),
    ]:
        expected = expected_ending(full.greedy(prompt, ending.limit), ending, tokenizer)
        for drafting in draftings:
            ready = with_eos(with_tokenizer(model, tokenizer), *ending.eos)
            decoder = drafting.decoder(ready) if drafting else Decoder(ready)
            chunks = list(
                decoder.stream(
                    prompt, ending.limit, stop=ending.stop, end_on_repeat=ending.end_on_repeat
                )
            )
            tokens = [t for c in chunks for t in c.tokens]
            text = "".join(c.text or "" for c in chunks)
            assert (tokens, chunks[-1].finish_reason, text) == expected, (prompt, ending, drafting)
            assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
            settled = ""
            for chunk in chunks:  # what was shown is never taken back
                settled += chunk.text or ""
                assert expected[2].startswith(settled)
        reasons[expected[1]] += 1
    return reasons
