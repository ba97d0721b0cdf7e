"""The interface of drafters, which propose draft tokens.

A drafter has three parts: its settings, a `DrafterSpec` as a profile stores them; the drafter, made
once for a model and these settings; and its session, the state of one request. Concurrent requests
share no mutable state. This drafter always repeats the last token:

    class Again(DrafterSpec):
        kind: Literal["again"] = "again"

        def build(self, model: object, module_folders: object) -> Drafter:
            return self

        def new_session(self) -> DraftSession:
            return AgainSession()


    class AgainSession(DraftSession):
        def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
            return Draft(ctx.pending[0].repeat(max_tokens))

Its line in `recipe.DRAFTERS` names its file; docs/extending.md shows every step. Loading a profile
must not import torch. A drafter that needs torch therefore has its settings in `spec.py` and the
rest in `session.py`, which `build` imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.drafters.lookup.answer_memory import AnswerMemory
    from skipsearch.engine import LayerTap
    from skipsearch.engine.sampler import TokenSampler
    from skipsearch.models.adapter import ModelAdapter
    from skipsearch.models.kv_cache import KVCache, PassPlan, Planner


@dataclass
class DecodeContext:
    """The state of a request that its drafters read between rounds.

    A drafter may write K/V only to the slots from `cache.length` on, which verification overwrites.
    """

    model: ModelAdapter
    cache: KVCache
    planner: Planner
    # [1, 1]: the last emitted token; its K/V is not in the cache yet. For a second model that
    # drafts, [1, T]: all tokens that it has not read, the last emitted one included.
    pending: Tensor
    history: list[int]  # all tokens so far, including the prompt and the pending token
    prompt_length: int  # tokens of `history` that belong to the prompt
    sampler: TokenSampler
    answer_memory: AnswerMemory | None = None  # earlier answers to copy from; None: none


@dataclass(frozen=True)
class PartialPass:
    """The part of a pass that the draft computed, so that verification need not repeat it.

    The K/V of these rows in the layers below `next_layer` are in the cache already.
    """

    hidden: Tensor  # [1, R, H]: input of `next_layer` at the pending token and the main path, R ≤ N
    next_layer: int


@dataclass(frozen=True)
class Draft:
    """The tokens that a drafter proposes in one round: a chain, or a tree.

    In a tree, the first `n_main` nodes are a chain, and the others are siblings of these nodes.
    Nodes with the same parent are different tokens. They are drawn in order, without replacement,
    from one distribution. Each of their rows of `probs` is this distribution.
    """

    tokens: Tensor  # [N], N ≥ 1
    probs: Tensor | None = None  # [N, V]: the distribution of each draw; None: all one-hot
    copied_from: int | None = None  # position in the history of the first copied token
    # [N]: the parent of each node. Nodes are counted from 1; 0 is the pending token. Parents
    # precede their children. None: a chain.
    parents: tuple[int, ...] | None = None
    n_main: int | None = None  # length of the main path of a tree
    partial_pass: PartialPass | None = None  # verification may resume from it
    # [N]: the node of the drafter's own draft that each node is, if a constraint removed others.
    own_nodes: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        """The length of the longest path: the most tokens that a round can accept."""
        return len(self.tokens) if self.parents is None else max(list_depths(self.parents))

    def main_path(self) -> Draft:
        """Return the main path, without siblings."""
        if self.parents is None:
            return self
        return Draft(
            self.tokens[: self.n_main],
            None if self.probs is None else self.probs[: self.n_main],
            self.copied_from,
            partial_pass=self.partial_pass,
        )


def list_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the depth of each node of a tree, from 1. parents: as in `Draft`."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return tuple(depths[1:])


class DraftSession:
    """The state of one request in a drafter. A subclass must define only `draft`.

    The order of calls is: `tap` before each pass of the full model, `begin` after the prefill, and
    in each round `draft`, `verified` if this session drafted, and `committed`.
    """

    # Whether the session reads hidden states of the full model. If not, `tap` and `committed` are
    # not called.
    observes_hidden: ClassVar[bool] = False
    # Whether it reads the last layer's output alone, which a model with recurrent layers has too.
    observes_last_hidden_only: ClassVar[bool] = False
    # Whether it chooses its mask from hidden states. The time for the choice is counted separately.
    selects_mask: ClassVar[bool] = False

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        """Return a tap that observes the hidden states of the next pass of the full model, or None.

        n_rows: rows of the pass without padding. A tap may run blocks of the model with this plan,
        because the pass overwrites their K/V.
        """
        return None

    def begin(self, ctx: DecodeContext) -> None:
        """Start the request: the prompt is in the cache, the first generated token is pending."""

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        """Return a draft of 1 to `max_tokens` tokens; None to leave the round to the next drafter.

        max_tokens: at least 1.
        """
        raise NotImplementedError

    def continue_draft(
        self, ctx: DecodeContext, tokens: Sequence[int], max_tokens: int
    ) -> Draft | None:
        """Return a chain of up to `max_tokens` tokens after `tokens`, which a constraint forces.

        None if there is none, or if this drafter cannot continue tokens that may be rejected.
        `verified` is not called for such a round.
        """
        return None

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        """Learn the result of a round that this session drafted.

        accepted_nodes: accepted nodes of the draft, counted from 1, in text order; for a chain, 1,
        2, …, n. If a constraint forbids all of the draft, it is (), and nothing was verified. At
        the next `draft`, `ctx.history` has the emitted tokens of all rounds.
        """

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        """Learn the result of any round, after its tokens were committed.

        accepted_rows: accepted rows of the verify pass, without row 0, the pending token."""


class Drafter(Protocol):
    """A drafter that is made once for a model and settings.

    It holds data that requests may share, such as a mask.
    """

    def new_session(self) -> DraftSession:
        """Return the state of a new request, before its prefill."""


@runtime_checkable
class LearningDrafter(Protocol):
    """A drafter that learns from request to request which drafts are accepted."""

    @property
    def is_learning(self) -> bool:
        """Whether the drafter still learns."""
