"""`Batch`: requests that are decoded side by side, each with its own acceptance, end and seed.

Each request runs the loop of `loop.py` for itself, on a row of one cache. Where it needs a pass of a model it waits, and when all of them
wait the passes of one kind run as one, padded to the longest: drafts first, so that those who draft little wait for those who draft much
and one verify pass serves all. So every rule of decoding stands in one place, and a batch knows none of them.

A waiting request is a suspended greenlet: nothing of it runs at the same time as anything else, and one thread drives them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from skipsearch.cache import KVCache
from skipsearch.decoding.loop import Chunk, Generation
from skipsearch.decoding.prefix import Lender, Prefix
from skipsearch.decoding.request import Request
from skipsearch.decoding.rooms import Lent, Rooms
from skipsearch.decoding.watching import Watch
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.engine import Wanted, inference, is_steady, together
from skipsearch.errors import DecodeError

if TYPE_CHECKING:
    from skipsearch.decoding.decoder import Decoder


class Row:
    """One request of a batch. chunk: what the latest step added to it; None where something ended it: error.

    ended: whether there will be no more. result: of its work, once that is done.
    """

    def __init__(self, work: Callable[[], Any]):
        self.chunk: Chunk | None = None
        self.error: Exception | None = None
        self.result: Any = None
        self.ended = False
        self._work = work
        self._greenlet = greenlet(self._run)

    def resume(self, answer: Any = None) -> Any:
        """On until it waits for a pass, which is returned, or for the next step: None. answer: what the pass that it waited for gave."""
        self._greenlet.parent = getcurrent()
        said = self._greenlet.throw(answer) if isinstance(answer, Exception) else self._greenlet.switch(answer)
        return said if isinstance(said, Wanted) else None

    def latest(self) -> Chunk:
        """What the latest step added. Raises: what ended it."""
        if self.error is not None:
            raise self.error
        assert self.chunk is not None
        return self.chunk

    def close(self) -> None:
        """Ends it where it is."""
        if self._greenlet and not self.ended:
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)
        self.ended = True

    def _run(self, _: Any) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        finally:
            self.ended = True


def wait_for(wanted: Wanted | None) -> Any:
    """Called within a row: hands over to the driver, and returns its answer. None waits for the next step."""
    driver = getcurrent().parent
    assert driver is not None
    return driver.switch(wanted)


class Batch:
    """At most `rows` requests of a decoder side by side: `step` decodes a round of each, and between rounds requests may join and leave.

    plain_from: requests from which on nobody drafts, since plain decoding is faster then; None: they always draft. A sampled request that
    drafts in other rounds than alone gets another sample of the same distribution; apart from that a request's tokens are those that it
    gets alone. A pass over several rows rounds otherwise than one over a single row, so in fp32 and below a near-tie may fall otherwise;
    not with `exact`, whose passes run row by row, or together where the engine keeps a row's bits in any pass (native). Row by row run also
    passes of models that keep more of a text than K/V by slot, and passes whose hidden states a drafter watches. The engine graph
    runs passes over several rows as lean does.
    One thread drives a batch. A row's times count what it waited for others.
    """

    def __init__(self, decoder: Decoder, rows: int, plain_from: int | None = None):
        if rows < 1:
            raise DecodeError(f"rows is {rows!r}; a batch has at least one")
        self.decoder, self.most, self.plain_from = decoder, rows, plain_from
        self.rows: list[Row] = []
        self._crowded = False
        model, exact = decoder.model, decoder.loop.exact
        joins = type(model.new_cache(1, 1)) is KVCache and model.spec.together and (not exact or is_steady(model))
        self._room = Rooms(model, rows, lambda *wanted: wait_for(Wanted(*wanted))) if joins else None

    @property
    def free(self) -> int:
        """Requests that may join."""
        return self.most - len(self.rows)

    def join(self, request: Request, *, trace: bool = False, prefix: Prefix | None = None, owner: str | None = None) -> Row:
        """A request that `step` decodes from now on. trace, prefix: as in `Decoder.stream`; what it leaves in the prefix is a copy.

        owner: what its prompt begins with as that of another row of this owner is computed once; None shares with nobody.

        Raises: DecodeError for one that makes no sense, or where there is no room.
        """
        ready = request.ready(self.decoder.model)

        def work() -> None:
            with closing(self.decoder.loop.stream(ready, self.lender(prefix, owner), self.watch(trace))) as stream:  # type: ignore[type-var]
                for chunk in stream:
                    row.chunk = chunk
                    if chunk.finish_reason is None:
                        wait_for(None)

        row = self.start(work)
        return row

    def start(self, work: Callable[[], Any]) -> Row:
        """Any work that decodes by way of `lender`. Raises: DecodeError where there is no room."""
        if not self.free:
            raise DecodeError(f"the batch has {self.most} rows and all are taken: step until one has ended")
        row = Row(work)
        self.rows.append(row)
        return row

    def lender(self, prefix: Prefix | None = None, owner: str | None = None) -> Lender | None:
        """What a request that runs in this batch gets its cache from, as `join` has it; None: one of its own."""
        return prefix if self._room is None else Lent(self._room, prefix, owner)

    @inference
    def step(self) -> list[Row]:
        """A round of every request. Returns all of them; those that have ended are no longer part of the batch."""
        if self._room is not None:
            self._room.close_ranks()
        self._crowded = self.plain_from is not None and len(self.rows) >= self.plain_from
        for row in self.rows:
            row.chunk = None
        answers: list[tuple[Row, Any]] = [(row, None) for row in self.rows]
        waiting: list[tuple[Row, Wanted]] = []
        while answers:
            for row, answer in answers:
                wanted = row.resume(answer)
                if wanted is not None:
                    waiting.append((row, wanted))
            answers = _next_pass(waiting)
        rows, self.rows = self.rows, [row for row in self.rows if not row.ended]
        return rows

    @inference
    def drop(self, row: Row) -> None:
        """A request that nobody waits for any more."""
        row.close()
        if row in self.rows:
            self.rows.remove(row)

    def close(self) -> None:
        for row in list(self.rows):
            self.drop(row)

    def watch(self, traced: bool = False) -> Watch | None:
        """What a request that runs in this batch is watched by. traced: it tells what is proposed."""
        return _Company(self, traced) if traced or self.plain_from is not None else None

    @property
    def crowded(self) -> bool:
        return self._crowded


def generate_batch(batch: Batch, requests: Sequence[Request]) -> list[Generation]:
    """All of them, in their order. Raises: what the first of them that fails raises."""
    asked = iter(enumerate(requests))
    chunks: list[list[Chunk]] = [[] for _ in requests]
    numbers: dict[Row, int] = {}
    with closing(batch):
        while True:
            for _, (number, request) in zip(range(batch.free), asked, strict=False):
                numbers[batch.join(request, owner="caller")] = number
            if not batch.rows:
                return [Generation.of(found) for found in chunks]
            for row in batch.step():
                if row.error is not None:
                    raise row.error
                if row.chunk is not None:
                    chunks[numbers[row]].append(row.chunk)


def _next_pass(waiting: list[tuple[Row, Wanted]]) -> list[tuple[Row, Any]]:
    """Runs the passes of one kind, of those that wait, and returns what each gave; drafts before passes of the full model."""
    drafting = [pair for pair in waiting if pair[1].mask is not None]
    kinds = [wanted.kind for _, wanted in drafting or waiting]
    if not kinds:
        return []
    kind = max(kinds, key=kinds.count)
    chosen = [pair for pair in waiting if pair[1].kind == kind]
    waiting[:] = [pair for pair in waiting if pair[1].kind != kind]
    try:
        answers: Sequence[Any] = together([wanted for _, wanted in chosen])
    except Exception as error:
        answers = [error] * len(chosen)   # raised where each of them waits
    return [(row, answer) for (row, _), answer in zip(chosen, answers, strict=True)]


class _Company(Watch):
    """Of a request in a batch: its drafters have nothing to say while the batch is crowded. traced: what they propose is told."""

    def __init__(self, batch: Batch, traced: bool):
        super().__init__()
        self._batch, self._traced = batch, traced

    def over(self, drafter: int, session: DraftSession) -> DraftSession:
        return _Quiet(self._batch, super().over(drafter, session) if self._traced else session)


class _Quiet:
    def __init__(self, batch: Batch, session: DraftSession):
        self._batch, self._session = batch, session

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        return None if self._batch.crowded else self._session.draft(ctx, most)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self._session.verified(ctx, path)

    def __getattr__(self, name: str) -> Any:   # whatever else a session is told
        return getattr(self._session, name)
