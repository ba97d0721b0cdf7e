"""Checks of batches: each request gets the tokens that it gets alone.

The other requests of the batch, and when they join or leave, do not matter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from helpers.modules import module_folder, small_kangaroo, small_module, small_s3d
from helpers.tiny import VOCAB, FullModel, tiny_llama, tiny_model_and_reference, with_eos
from models.tiny import adapted, hf_model

from decoding.dynamic_mask_checks import CHOOSING
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterSpec, Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Batch, Decoder, Request, RunningRequest, batch
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.models import ModelAdapter, adapt

from .checks import DRAFTINGS, PROMPTS, Drafting
from .s3d_checks import TREE


@dataclass(frozen=True)
class Guest:
    """A request of a batch.

    after: the earliest step at which it joins. read: tokens after which it is dropped; None: it
    stays to its end. prefix: the index of its prefix cache, of two that outlive requests; None: it
    has none.
    """

    request: Request
    after: int = 0
    read: int | None = None
    prefix: int | None = None


@dataclass(frozen=True)
class Trained:
    """A decoder that drafts with any drafters, modules included.

    learns: from one request for the next. Then rounds, and so samples, depend on the other
    requests.
    """

    drafters: tuple[DrafterSpec, ...]
    exact: bool = False
    learns: bool = False

    def decoder(self, model: ModelAdapter) -> Decoder:
        return Decoder(
            model, Recipe(self.drafters), exact=self.exact, module_folders=[module_folder()]
        )


LOOKUP = Lookup(min_match=1, draft_length=4)


@cache
def trained() -> dict[str, Trained]:
    """Return decoders with modules, with masks chosen while decoding, and with several of these."""
    module, early, ahead = small_module(0.1, 4), small_kangaroo("attention", 0.1, 4), small_s3d(2)
    beside = {"siblings": Siblings(below=0.7, most=2)}
    return {
        "adapted": Trained((module,)),
        "adapted that drafts nonsense, behind lookup": Trained((LOOKUP, small_module(30.0, 4))),
        "adapted with siblings": Trained((module.model_copy(update=beside),)),
        "kangaroo": Trained((early,)),
        "kangaroo with siblings, behind lookup": Trained((LOOKUP, early.model_copy(update=beside))),
        "s3d, behind lookup": Trained((LOOKUP, ahead)),
        "s3d with a tree": Trained((ahead.model_copy(update={"tree": TREE}),)),
        "kangaroo, then clasp": Trained((small_kangaroo("attention", 0.1, 3, 0.9), CHOOSING[0])),
        **{
            f"{spec.kind} {i}": Trained((LOOKUP, spec), learns=spec.kind == "swift")
            for i, spec in enumerate(CHOOSING)
        },
    }


def guests(
    seed: int, most: int = 8, longest: int = 24, vocab: int = VOCAB, context: int | None = None
) -> list[Guest]:
    """Return requests of various lengths: some sampled, some late, some dropped."""
    draw = random.Random(seed)
    found = []
    for number in range(draw.randint(1, most)):
        size = min(draw.choice((1, 2, 5, 9, 30, 70)), (context or 94) - longest)
        prompt = tuple(draw.randrange(vocab) for _ in range(draw.randint(1, size)))
        asked = Request(
            prompt,
            draw.randint(1, longest),
            temperature=draw.choice((0.0, 0.0, 0.8)),
            seed=number,
            top_k=draw.choice((0, 20)),
            end_on_repeat=draw.choice((None, None, 3)),
        )
        found.append(
            Guest(
                asked,
                draw.choice((0, 0, 0, 1, 4, 9)),
                draw.choice((None, None, None, 3)),
                draw.choice((None, None, 0, 1)),
            )
        )
    return found


GUESTS = (
    Guest(Request(PROMPTS[0], 16)),
    Guest(Request(PROMPTS[2], 5), prefix=0),
    Guest(Request(PROMPTS[1], 24, temperature=0.9, seed=3)),
    Guest(Request(PROMPTS[3], 12), after=2),
    Guest(Request(PROMPTS[2] * 3, 20, temperature=0.7, seed=4), after=1),
    Guest(Request(PROMPTS[0] * 9, 14), after=3, read=4),
    Guest(Request((*PROMPTS[2][:4], 7, 8, 50, 51), 15), after=6, prefix=0),
    Guest(Request(PROMPTS[3], 18, temperature=0.9, seed=3), after=7),
)
ROWS = 4


def check_batch(
    asked: Sequence[Guest] = GUESTS,
    drafting: Drafting | Trained | None = DRAFTINGS[0],
    rows: int = ROWS,
    world: tuple[ModelAdapter, FullModel] | None = None,
    eos: Sequence[int] = (),
    seen: Counter[str] | None = None,
    max_slots: int | None = None,
) -> DecodeStats:
    """Check that greedy rows get the full model's own tokens, and sampled rows those of their seed.

    Each row takes as many rounds as alone. seen: counts requests that joined while others were
    decoded, that ended, and that left before their end.
    """
    model, full = world or tiny_model_and_reference()
    model, learns = with_eos(model, *eos), isinstance(drafting, Trained) and drafting.learns
    asked = [guest for guest in asked if guest.request.temperature == 0] if learns else asked
    decoder = drafting.decoder(model) if drafting else Decoder(model)
    alone = {guest: decoder.generate(guest.request) for guest in asked}
    prefixes, busy = [PrefixCache(), PrefixCache()], dict[int, Guest]()
    waiting, inside, read, total, steps = (
        list(asked),
        dict[RunningRequest, Guest](),
        dict[Guest, list[int]](),
        DecodeStats(),
        0,
    )
    side_by_side, tally = (
        Batch(decoder.loop, rows, max_slots=max_slots),
        Counter[str]() if seen is None else seen,
    )
    while waiting or inside:
        for guest in [guest for guest in waiting if guest.after <= steps][: side_by_side.n_free]:
            tally["joined later" if inside and steps else "joined at the start"] += 1
            own = (
                guest.prefix if guest.prefix not in busy else None
            )  # a prefix serves one request at a time
            inside[
                side_by_side.join(
                    guest.request, prefix_cache=None if own is None else prefixes[own]
                )
            ] = guest
            if own is not None:
                busy[own] = guest
            waiting.remove(guest)
            read[guest] = []
        for row in side_by_side.run_round():
            guest = inside[row]
            assert row.error is None, (guest, row.error)
            assert row.chunk is not None, guest
            read[guest] += row.chunk.tokens
            gone = guest.read is not None and len(read[guest]) >= guest.read and not row.ended
            if gone:
                side_by_side.drop(row)
            if gone or row.ended:
                tally["left" if gone else "ended"] += 1
                del inside[row]
                busy = {own: owner for own, owner in busy.items() if owner is not guest}
            if row.ended and not gone:
                result, stats = alone[guest], row.chunk.stats
                assert (read[guest], row.chunk.finish_reason) == (
                    result.tokens,
                    result.finish_reason,
                ), (asked, guest, read[guest], result)
                assert stats is not None
                if (
                    guest.prefix is None and not learns
                ):  # K/V that others left change which draft a near-tie takes
                    assert replace(stats, cached_tokens=0) == replace(
                        result.stats, **_times(stats)
                    ), guest
                total += stats
            assert read[guest] == alone[guest].tokens[: len(read[guest])], (asked, guest)
            if guest.request.temperature == 0 and not eos:
                assert read[guest] == full.greedy(guest.request.input_ids, len(read[guest])), guest  # type: ignore[arg-type]
        assert len(side_by_side.running) == len(inside)
        steps += 1
    return total


def _times(stats: DecodeStats) -> dict[str, Any]:
    return {
        name: getattr(stats, name)
        for name in DecodeStats.__dataclass_fields__
        if name.endswith("seconds")
    }


def check_batch_of_trees() -> None:
    check_batch(drafting=DRAFTINGS[6])


def check_batch_of_lookups() -> None:
    check_batch(drafting=DRAFTINGS[4])


def check_batch_of_windows() -> None:
    """Check rows of different lengths, each of which sees its latest eight tokens."""
    name = "mistral-window"
    world = with_eos(adapted(name)), FullModel(hf_model(name))
    asked = [
        replace(
            guest,
            request=replace(
                guest.request, input_ids=tuple(token % 61 for token in guest.request.input_ids)
            ),
        )
        for guest in GUESTS
        if len(guest.request.input_ids) < 60
    ]
    check_batch(asked, Drafting(SkipMask(3, (1,)), 3), world=world)


def check_batch_of_kangaroos() -> None:
    check_batch(drafting=trained()["kangaroo"])


def check_batch_of_clasps() -> None:
    check_batch(drafting=trained()["clasp 0"])


def check_batch_that_grows() -> None:
    """Check a request that needs a larger cache and joins while others decode and keep theirs."""
    hf = tiny_llama(layers=2, hidden=16, context=1100)
    world = adapt(hf), FullModel(hf)
    long = tuple(i * 7 % VOCAB for i in range(400))
    drafting = Drafting(DRAFTINGS[0].mask and type(DRAFTINGS[0].mask)(2, (1,), (1,)), 3)
    check_batch(
        [
            Guest(Request(PROMPTS[0], 30)),
            Guest(Request(PROMPTS[2], 24)),
            Guest(Request(long, 6), after=3),
        ],
        drafting,
        world=world,
    )


def check_passes_of_a_batch() -> None:
    """Check that requests that have ended cost nothing.

    The number of passes is that of the rounds and draft steps of the running requests.
    """
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    asked = [
        Request(PROMPTS[0], 3),
        Request(PROMPTS[1], 9),
        Request(PROMPTS[2], 22),
        Request(PROMPTS[3], 1),
    ]
    wanted, widest, real = 0, 0, batch.run_batched

    def counting(passes: Any) -> Any:
        nonlocal wanted, widest
        wanted, widest = wanted + len(passes), max(widest, len(passes))
        return real(passes)

    with patch.object(batch, "run_batched", counting):
        found = decoder.generate_batch(asked, 4)
    assert wanted == sum(one.stats.rounds + one.stats.drafted for one in found)
    assert widest == 3, (
        "the request for one token ends with its prefill; the others share their passes"
    )


def check_owners() -> None:
    """Check that a shared prompt is computed once for its owner, and never used for another one.

    Other requests are decoded at the same time.
    """
    model, full = tiny_model_and_reference()
    text = PROMPTS[2] * 3
    asked = (
        ("one", text),
        ("other", (*text, 5)),
        ("one", text),
        ("one", (*text[:20], 1, 2, 3, 4, 5)),
        (None, text),
    )
    batch = DRAFTINGS[0].decoder(model).new_batch(len(asked))
    rows = [batch.join(Request(prompt, 10), tenant=owner) for owner, prompt in asked]
    read: dict[RunningRequest, list[int]] = {row: [] for row in rows}
    known: dict[RunningRequest, int] = {}
    while batch.running:
        for row in batch.run_round():
            chunk = row.chunk_or_raise()
            read[row] += chunk.tokens
            known |= {row: chunk.stats.cached_tokens} if chunk.stats else {}
    assert [known[row] for row in rows] == [0, 0, len(text) - 1, 20, 0]
    assert [read[row] for row in rows] == [full.greedy(prompt, 10) for _, prompt in asked]
