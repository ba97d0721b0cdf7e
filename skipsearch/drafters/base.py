"""The drafter port: where draft tokens come from.

A drafter is three things in one file: its settings, a `DrafterSpec` as a profile stores them; the drafter, made once for a model and those
settings; and its session, which is what one request holds. Two requests that interleave share nothing that changes. This is all of a
drafter that always repeats the last token:

    class Again(DrafterSpec):
        kind: Literal["again"] = "again"

        def build(self, model: object, folders: object) -> Drafter:
            return self

        def begin(self, ctx: DecodeContext) -> DraftSession:
            return self

        def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
            return Draft(ctx.pending[0].repeat(most))

        def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
            pass

Its line in `recipe.DRAFTERS` says where its file is; CONTRIBUTING.md goes the whole way. Nothing here loads torch, because reading a
profile must not: a drafter that needs torch imports it where it drafts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.cache import KVCache, PassPlan, Planner
    from skipsearch.drafters.memory import Memory
    from skipsearch.engine import Scored, Tap
    from skipsearch.models.spec import ModelAdapter


class TokenPicker(Protocol):
    """Chooses a token from logits the way the request asks for: greedily, or by sampling from a warped distribution."""

    @property
    def key(self) -> Hashable:
        """Equal for pickers that score alike."""

    def score(self, logits: Tensor, confidence: bool) -> Scored:
        """logits: [B, V] -> what a token is chosen by and, with `confidence`, the top probability of the distribution that it is drawn from
        (of the plain softmax where the choice is greedy)."""

    def draw(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
        """(tokens [B, 1], the distribution they were drawn from [B, V], or None for a greedy choice)."""

    def ranked(self, choices: int) -> TokenPicker:
        """The same, but `draw` gives tokens [B, choices]: the choice, then what would be chosen if the ones before it were ruled out. Where
        sampling has nothing left to choose from, a token of probability 0 stands."""


@dataclass
class DecodeContext:
    """One request, as its drafters see it between rounds.

    pending: [1, 1], the last emitted token, whose K/V no pass has written yet. history: all tokens so far, prompt and pending one included.
    prompt: how many of them are the prompt's.
    memory: earlier answers that may be copied from; None: each request for itself.
    A drafter may write K/V behind `cache.length`, never before it: verification writes over what it leaves there.
    """

    model: ModelAdapter
    cache: KVCache
    planner: Planner
    pending: Tensor
    history: list[int]
    prompt: int
    picker: TokenPicker
    memory: Memory | None = None


@dataclass(frozen=True)
class Resume:
    """Work of a draft that its verification need not do again: its first rows have been through the full model's layers below `layer`.

    hidden: [1, R, H], what goes into that layer at the pending token and the tokens of the trunk behind it, R ≤ N. The K/V of the layers
    below it are in these tokens' slots.
    """

    hidden: Tensor
    layer: int


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one round: a chain, or a tree.

    tokens: [N], at least one. probs: [N, V], what each token was drawn from; None where every choice was certain (a one-hot q).
    source: of copied tokens, where in `history` the first of them stands.
    parents: [N], of a tree: which token each one follows, counted from 1, 0 being the pending token, parents before children. The first
    `trunk` tokens are a chain, and the others are alternatives to them. Tokens with the same parent differ, and were drawn one after
    another from the same distribution, which stands in the row of each, without replacement. None: a chain.
    resume: where verification may go on from; None: it begins at layer 0.
    """

    tokens: Tensor
    probs: Tensor | None = None
    source: int | None = None
    parents: tuple[int, ...] | None = None
    trunk: int | None = None
    resume: Resume | None = None

    def chain(self) -> Draft:
        """The trunk alone."""
        if self.parents is None:
            return self
        return Draft(self.tokens[:self.trunk], None if self.probs is None else self.probs[:self.trunk], self.source, resume=self.resume)


class DraftSession(Protocol):
    """What one request holds of a drafter."""

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        """At least one and at most `most` tokens, most >= 1. None: nothing to say in this round, so the next drafter is asked."""

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        """Called after the verify pass of a round that this drafter drafted. path: which of its tokens stood, counted from 1, in the order
        of the text; of a chain 1, 2, …, n. What any round emitted, this drafter's or not, stands in `ctx.history` at the next `draft`."""


class WatchingSession(DraftSession, Protocol):
    """A session that reads hidden states of the full model's passes. chooses: to choose its mask by them, which is counted apart."""

    chooses: bool

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        """Asked before each pass of the full model over this request's text: what the pass shows its hidden states to (`engine.onward`);
        None: nothing. rows: how many of the pass's rows are no padding. A tap may run blocks of the model on this plan, since the pass
        writes over the K/V that it leaves."""

    def begin(self, ctx: DecodeContext) -> None:
        """The prompt is in the cache and its first token is pending."""

    def committed(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        """Called after every round, whoever drafted it, once its tokens are committed. path: which rows of its verify pass stood behind the
        first, which was the pending token."""


@runtime_checkable
class WatchingDrafter(Protocol):
    """A drafter whose sessions watch. It takes the place of `Drafter`."""

    def watch(self) -> WatchingSession:
        """A request begins: nothing of it has been computed yet."""


@runtime_checkable
class LearningDrafter(Protocol):
    """A drafter that learns from one request for the next: how its drafts fare, and nothing of what a text says."""

    @property
    def learning(self) -> bool:
        """Whether it goes on learning."""

    def state(self) -> dict[str, Any]:
        """What it knows, as plain data for JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises: DecodeError for what is no state of such a drafter for this model."""


class Drafter(Protocol):
    """Made once for a model and its settings. It holds what requests may share, such as a mask."""

    def begin(self, ctx: DecodeContext) -> DraftSession:
        """A request begins: its prompt is in the cache and its first token is pending."""
