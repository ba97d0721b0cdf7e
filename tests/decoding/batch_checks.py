"""What a batch promises: each request gets the tokens that it gets alone, whoever decodes beside it, joins or leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from helpers.tiny import VOCAB, FullModel, small_world, tiny_llama, with_eos

from skipsearch.decoding import Batch, Decoder, Request, Row, batch
from skipsearch.decoding.prefix import Prefix
from skipsearch.models import ModelAdapter, adapt
from skipsearch.stats import DecodeStats

from .checks import DRAFTINGS, PROMPTS, Drafting


@dataclass(frozen=True)
class Guest:
    """A request of a batch. after: steps before it joins, at the earliest. read: tokens after which it is dropped; None: it stays to its
    end. prefix: whose, of two that outlive their requests; None: it has none."""

    request: Request
    after: int = 0
    read: int | None = None
    prefix: int | None = None


def guests(seed: int, most: int = 8, longest: int = 24) -> list[Guest]:
    """Ragged: long and short prompts and answers, greedy ones among sampled ones, some late, some dropped."""
    draw = random.Random(seed)
    found = []
    for number in range(draw.randint(1, most)):
        size = draw.choice((1, 2, 5, 9, 30, 70))
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, size)))
        asked = Request(prompt, draw.randint(1, longest), temperature=draw.choice((0.0, 0.0, 0.8)), seed=number,
                        top_k=draw.choice((0, 20)), end_on_repeat=draw.choice((None, None, 3)))
        found.append(Guest(asked, draw.choice((0, 0, 0, 1, 4, 9)), draw.choice((None, None, None, 3)), draw.choice((None, None, 0, 1))))
    return found


GUESTS = (Guest(Request(PROMPTS[0], 16)), Guest(Request(PROMPTS[2], 5), prefix=0), Guest(Request(PROMPTS[1], 24, temperature=0.9, seed=3)),
          Guest(Request(PROMPTS[3], 12), after=2), Guest(Request(PROMPTS[2] * 3, 20, temperature=0.7, seed=4), after=1),
          Guest(Request(PROMPTS[0] * 9, 14), after=3, read=4), Guest(Request((*PROMPTS[2][:4], 7, 8, 50, 51), 15), after=6, prefix=0),
          Guest(Request(PROMPTS[3], 18, temperature=0.9, seed=3), after=7))
ROWS = 4


def check_batch(asked: Sequence[Guest] = GUESTS, drafting: Drafting | None = DRAFTINGS[0], rows: int = ROWS,
                world: tuple[ModelAdapter, FullModel] | None = None, eos: Sequence[int] = ()) -> DecodeStats:
    """Greedy rows get the full model's own tokens, sampled rows those that their seed gets alone, in as many rounds as alone."""
    model, full = world or small_world()
    model = with_eos(model, *eos)
    decoder = drafting.decoder(model) if drafting else Decoder(model)
    alone = {guest: decoder.generate(guest.request) for guest in asked}
    prefixes, busy = [Prefix(), Prefix()], dict[int, Guest]()
    waiting, inside, read, total, steps = list(asked), dict[Row, Guest](), dict[Guest, list[int]](), DecodeStats(), 0
    side_by_side = Batch(decoder, rows)
    while waiting or inside:
        for guest in [guest for guest in waiting if guest.after <= steps][:side_by_side.free]:
            own = guest.prefix if guest.prefix not in busy else None   # a prefix serves one request at a time
            inside[side_by_side.join(guest.request, prefix=None if own is None else prefixes[own])] = guest
            if own is not None:
                busy[own] = guest
            waiting.remove(guest)
            read[guest] = []
        for row in side_by_side.step():
            guest = inside[row]
            assert row.error is None, (guest, row.error)
            assert row.chunk is not None, guest
            read[guest] += row.chunk.tokens
            gone = guest.read is not None and len(read[guest]) >= guest.read and not row.ended
            if gone:
                side_by_side.drop(row)
            if gone or row.ended:
                del inside[row]
                busy = {own: owner for own, owner in busy.items() if owner is not guest}
            if row.ended and not gone:
                result, stats = alone[guest], row.chunk.stats
                assert (read[guest], row.chunk.finish_reason) == (result.tokens, result.finish_reason), (asked, guest, read[guest], result)
                assert stats is not None
                if guest.prefix is None:   # K/V that others left change which draft a near-tie takes
                    assert replace(stats, cached_tokens=0) == replace(result.stats, **_times(stats)), guest
                total += stats
            assert read[guest] == alone[guest].tokens[:len(read[guest])], (asked, guest)
            if guest.request.temperature == 0 and not eos:
                assert read[guest] == full.greedy(guest.request.input_ids, len(read[guest])), guest  # type: ignore[arg-type]
        assert len(side_by_side.rows) == len(inside)
        steps += 1
    return total


def _times(stats: DecodeStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in DecodeStats.__dataclass_fields__ if name.endswith("seconds")}


def check_batch_of_trees() -> None:
    check_batch(drafting=DRAFTINGS[6])


def check_batch_of_lookups() -> None:
    check_batch(drafting=DRAFTINGS[4])


def check_batch_that_grows() -> None:
    """A request that needs a larger cache joins while others decode; theirs stays."""
    hf = tiny_llama(layers=2, hidden=16, context=1100)
    world = adapt(hf), FullModel(hf)
    long = tuple(i * 7 % VOCAB for i in range(400))
    drafting = Drafting(DRAFTINGS[0].mask and type(DRAFTINGS[0].mask)(2, (1,), (1,)), 3)
    check_batch([Guest(Request(PROMPTS[0], 30)), Guest(Request(PROMPTS[2], 24)), Guest(Request(long, 6), after=3)], drafting, world=world)


def check_passes_of_a_batch() -> None:
    """Whoever has ended costs nothing more: as many passes are asked for as these requests have rounds and draft steps."""
    decoder = DRAFTINGS[0].decoder(small_world()[0])
    asked = [Request(PROMPTS[0], 3), Request(PROMPTS[1], 9), Request(PROMPTS[2], 22), Request(PROMPTS[3], 1)]
    wanted, widest, real = 0, 0, batch.together

    def counting(passes: Any) -> Any:
        nonlocal wanted, widest
        wanted, widest = wanted + len(passes), max(widest, len(passes))
        return real(passes)

    with patch.object(batch, "together", counting):
        found = decoder.generate_batch(asked, 4)
    assert wanted == sum(one.stats.rounds + one.stats.drafted for one in found)
    assert widest == 3, "the request for one token ends with its prefill; the others share their passes"


def check_owners() -> None:
    """What a prompt shares is computed once for its owner, beside others who are decoded, and never for anybody else."""
    model, full = small_world()
    text = PROMPTS[2] * 3
    asked = (("one", text), ("other", (*text, 5)), ("one", text), ("one", (*text[:20], 1, 2, 3, 4, 5)), (None, text))
    batch = DRAFTINGS[0].decoder(model).batch(len(asked))
    rows = [batch.join(Request(prompt, 10), owner=owner) for owner, prompt in asked]
    read: dict[Row, list[int]] = {row: [] for row in rows}
    known: dict[Row, int] = {}
    while batch.rows:
        for row in batch.step():
            chunk = row.latest()
            read[row] += chunk.tokens
            known |= {row: chunk.stats.cached_tokens} if chunk.stats else {}
    assert [known[row] for row in rows] == [0, 0, len(text) - 1, 20, 0]
    assert [read[row] for row in rows] == [full.greedy(prompt, 10) for _, prompt in asked]
