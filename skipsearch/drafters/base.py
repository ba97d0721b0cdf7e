"""The drafter port: where draft tokens come from.

A drafter has three parts: its settings, a `DrafterSpec` as a profile stores them; the drafter, made
once for a model and those settings; and its session, the state of one request. Two requests that
run at the same time share no changing state. This drafter always repeats the last token:

    class Again(DrafterSpec):
        kind: Literal["again"] = "again"

        def build(self, model: object, module_folders: object) -> Drafter:
            return self

        def new_session(self) -> DraftSession:
            return AgainSession()


    class AgainSession(DraftSession):
        def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
            return Draft(ctx.pending[0].repeat(max_tokens))

Its line in `recipe.DRAFTERS` names its file; CONTRIBUTING.md shows every step. Reading a profile
must not load torch. So a drafter that needs torch has its settings in `spec.py` and the rest in
`session.py`, which `build` imports."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.drafters.lookup.answer_memory import AnswerMemory
    from skipsearch.engine import DraftScores, LayerTap
    from skipsearch.models.adapter import ModelAdapter
    from skipsearch.models.kv_cache import KVCache, PassPlan, Planner


class TokenSampler(Protocol):
    """Chooses tokens from logits as the request asks: greedily, or by sampling from a warped
    distribution.
    """

    @property
    def key(self) -> Hashable:
        """Equal for samplers that score alike."""

    @property
    def is_greedy(self) -> bool:
        """Whether it chooses the `n_choices` most likely tokens, without a distribution."""

    @property
    def n_choices(self) -> int:
        """Tokens that `draw` returns: the choice and its siblings."""

    def score(self, logits: Tensor, with_confidence: bool) -> DraftScores:
        """Return what `draw` chooses by.

        logits: [B, V]. with_confidence: add the top probability of the distribution that the token
        is drawn from (of the plain softmax if the choice is greedy)."""

    def draw(self, scores: DraftScores) -> tuple[Tensor, Tensor | None]:
        """Return (tokens [B, 1], the distributions [B, V] they were drawn from; None if greedy)."""

    def top(self, n_choices: int) -> TokenSampler:
        """Return a sampler whose `draw` gives tokens [B, n_choices].

        Column 0 is the choice. Each later column is the choice if the earlier ones were ruled out.
        If sampling has nothing more to choose from, it gives a token of probability 0."""


@dataclass
class DecodeContext:
    """One request, as its drafters see it between rounds.

    A drafter may write K/V only in slots from `cache.length` on. Verification overwrites them.
    """

    model: ModelAdapter
    cache: KVCache
    planner: Planner
    pending: Tensor  # [1, 1]: the last emitted token; its K/V is not in the cache yet
    history: list[int]  # all tokens so far, including the prompt and the pending token
    prompt_length: int  # tokens of `history` that belong to the prompt
    sampler: TokenSampler
    answer_memory: AnswerMemory | None = None  # earlier answers to copy from; None: none


@dataclass(frozen=True)
class PartialPass:
    """Work of a draft that its verification need not repeat.

    The K/V of the layers below `next_layer` are in the slots of these rows already."""

    hidden: Tensor  # [1, R, H]: input of `next_layer` at the pending token and the main path, R ≤ N
    next_layer: int


@dataclass(frozen=True)
class Draft:
    """The tokens that a drafter proposes in one round: a chain, or a tree.

    In a tree the first `n_main` nodes are a chain, and the others are siblings of its nodes. Nodes
    with the same parent differ. They were drawn one after another, without replacement, from one
    distribution, which is in the row of each."""

    tokens: Tensor  # [N], N ≥ 1
    probs: Tensor | None = None  # [N, V]: what each token was drawn from; None: all one-hot
    copied_from: int | None = None  # position in the history of the first copied token
    # [N]: the parent of each node, counted from 1; 0 is the pending token; None: a chain. Parents
    # precede their children.
    parents: tuple[int, ...] | None = None
    n_main: int | None = None  # length of the main path of a tree
    partial_pass: PartialPass | None = None  # where verification may resume; None: at layer 0

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


class DraftSession:
    """The state of one request in a drafter. Only `draft` has to be written.

    The order of calls: `tap` before each pass of the full model, `begin` after the prefill, and in
    each round `draft`, `verified` if this session drafted, and `committed`."""

    # Whether it reads hidden states of the full model. `tap` and `committed` are called only if so.
    observes_hidden: ClassVar[bool] = False
    # Whether it reads them to choose its mask. The time for that is counted separately.
    selects_mask: ClassVar[bool] = False

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        """Return what observes the hidden states of the next pass of the full model, if anything.

        n_rows: rows of the pass that are no padding. A tap may run blocks of the model on this
        plan, since the pass overwrites their K/V."""
        return None

    def begin(self, ctx: DecodeContext) -> None:
        """Start the request: the prompt is in the cache, and its first token is pending."""

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        """Return 1 to `max_tokens` tokens; None: nothing, so the next drafter is asked.

        max_tokens: at least 1."""
        raise NotImplementedError

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        """Learn the result of a round that this session drafted.

        accepted_nodes: nodes of the draft that were accepted, counted from 1, in text order; of a
        chain 1, 2, …, n. The tokens that a round emitted, whoever drafted it, are in `ctx.history`
        at the next `draft`."""

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        """Learn the result of any round, after its tokens were committed.

        accepted_rows: rows of the verify pass that were accepted, without row 0, which is the
        pending token."""


class Drafter(Protocol):
    """What proposes drafts: made once for a model and its settings.

    It holds what requests may share, such as a mask."""

    def new_session(self) -> DraftSession:
        """Return the state of a new request, of which nothing has been computed yet."""


@runtime_checkable
class StatefulDrafter(Protocol):
    """A drafter that learns from one request for the next.

    It learns how its drafts fare, and nothing about the content of a text."""

    @property
    def is_learning(self) -> bool:
        """Whether it still learns."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain data for JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned.

        Raises: DecodeError if `state` is no state of such a drafter for this model."""
