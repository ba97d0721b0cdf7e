"""`Decoder`: what people call. A model, and a profile, a recipe, a bare mask or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from skipsearch.decoding.arguments import check_model, wrong_profile
from skipsearch.decoding.batch import Batch, generate_batch
from skipsearch.decoding.loop import Chunk, DecodeLoop, Generation
from skipsearch.decoding.prefix import Prefix
from skipsearch.decoding.request import Request, Settings
from skipsearch.decoding.sampling import is_whole
from skipsearch.decoding.session import Session
from skipsearch.decoding.watching import Watch
from skipsearch.drafters import LearningDrafter
from skipsearch.drafters.skip import Skip
from skipsearch.errors import DecodeError, MaskError
from skipsearch.exits import Exit, make_exit
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.recipe import Recipe
from skipsearch.stats import Price

DEFAULT_DRAFT_LENGTH = 12   # Draft & Verify's K
MOST_DRAFTED = 64
MOST_REMEMBERED = 10**7   # tokens; one takes up to 300 bytes of memory


class Decoder:
    """Decodes with `model`, drafting as a profile says; the tokens are the full model's own.

    profile: a Profile; a Recipe; a SkipMask, which is a recipe of one skip drafter with `draft_length` (12) and `exit_policy` (Draft &
    Verify's adaptive one); None for plain decoding on the same engine, which is also what a profile with `verdict: plain` asks for.
    exact: greedy tokens are the same to the bit with any profile and with none, in every dtype. Free on the engine native;
    elsewhere every pass has eight rows.
    prices: what the guard weighs each drafter's rounds by (`decoding/guard.py`), a profile's own if None; () is no guard. A bare mask or
    recipe has none. modules: folders in which the trained parts that a recipe names are looked for; a profile that was loaded from a file
    knows its own. remember: tokens of earlier answers that lookup may copy from, as for many requests that resemble one another; 0, the
    default, keeps each request to itself. What is copied shows in the time a request takes, so it is for the requests of one user.
    Any number of threads may use one decoder, or decoders of their own over one model.
    Raises: ProfileError for a profile of another model, MaskError for a mask of another depth, ModuleError for a trained part that is not
    there, is damaged, or was trained for another model.
    """

    def __init__(self, model: ModelAdapter, profile: Profile | Recipe | SkipMask | None = None, *, draft_length: int | None = None,
                 exit_policy: Exit | None = None, exact: bool = False, prices: Sequence[Price | None] | None = None,
                 modules: Sequence[Path] = (), remember: int = 0):
        check_model(model)
        self.model = model
        self.warnings: list[str] = []
        self.plain_from: int | None = None   # requests side by side from which on plain decoding is faster
        if isinstance(profile, SkipMask):
            profile = _recipe_of(profile, model, DEFAULT_DRAFT_LENGTH if draft_length is None else draft_length, exit_policy)
        elif draft_length is not None or exit_policy is not None:
            raise DecodeError("draft_length and exit_policy belong to a bare mask; a profile or recipe has its own")
        if isinstance(profile, Profile):
            from skipsearch.decoding.matching import check_profile

            self.warnings = check_profile(profile, model)
            prices = profile.prices if prices is None else prices
            modules = (*modules, *profile.folders)
            self.plain_from = profile.plain_from
            profile = profile.recipe
        if profile is not None and not isinstance(profile, Recipe):
            raise wrong_profile(profile)
        if not is_whole(remember) or not 0 <= remember <= MOST_REMEMBERED:
            raise DecodeError(f"remember is {remember!r}; it is a number of tokens up to {MOST_REMEMBERED:,}, and 0 remembers nothing")
        self.recipe = profile or Recipe()
        moving = [drafter.kind for drafter in self.recipe.drafters if drafter.moves]
        if moving and model.spec.engine == "graph":
            self.warnings.append(f"{' and '.join(moving)} choose{'s' if len(moving) == 1 else ''} masks while decoding, and the engine "
                                 "graph records passes under one mask: draft passes run layer by layer until a mask stays")
        self.loop = DecodeLoop(model, self.recipe, exact, prices or (), modules, int(remember))

    @property
    def learning(self) -> bool:
        """Whether a drafter still learns from one request for the next (`swift` does), so that the order of requests matters for speed."""
        return any(drafter.learning for drafter in self._learning().values())

    @property
    def lasting(self) -> bool:
        """Whether requests leave something behind that drafts of later ones depend on, and a later sample with them."""
        shared = any(getattr(getattr(drafter, "exit", None), "shared", False) for drafter in self.recipe.drafters)
        return shared or bool(self._learning()) or self.loop.memory is not None

    def state(self) -> dict[str, Any]:
        """What its drafters have learned from requests so far, as plain data for JSON; it holds nothing of their text. Greedy tokens do not
        depend on it. A sample does, within the same distribution: with a seed and the same state it comes again."""
        return {str(place): drafter.state() for place, drafter in self._learning().items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` of a decoder with the same recipe gave. Raises: DecodeError for anything else."""
        learning = self._learning()
        if not isinstance(state, dict) or {str(place) for place in learning} != state.keys():
            raise DecodeError(f"this is no state of a decoder with the recipe {self.recipe}: give what its `state` returned")
        for place, drafter in learning.items():
            drafter.restore(state[str(place)])

    def _learning(self) -> dict[int, LearningDrafter]:
        """By place in the recipe."""
        return {i: drafter for i, (_, drafter) in enumerate(self.loop.drafters) if isinstance(drafter, LearningDrafter)}

    def session(self) -> Session:
        """For requests that follow one another, such as the turns of a chat: what their prompts share is computed once."""
        return Session(self)

    def batch(self, rows: int) -> Batch:
        """For at most so many requests side by side, which may join and leave between rounds."""
        return Batch(self, rows, self.plain_from)

    def generate_batch(self, requests: Sequence[Request], rows: int = 8) -> list[Generation]:
        """Carry out all of them, at most `rows` side by side; the answers in their order.

        Raises: DecodeError for a request that makes no sense.
        """
        return generate_batch(self.batch(max(1, min(rows, len(requests)))), requests)

    def stream(self, input_ids: Sequence[int] | Tensor | Request, max_new_tokens: int = 128, *, trace: bool = False,
               prefix: Prefix | None = None, **settings: Unpack[Settings]) -> Iterator[Chunk]:
        """As `generate`, a chunk a round. trace: each chunk says what was proposed in its round. prefix: a session's own.

        Raises: DecodeError before the first chunk.
        """
        if not isinstance(input_ids, Request):
            request = Request(input_ids, max_new_tokens, **settings)
        elif settings or max_new_tokens != 128:
            raise DecodeError("a Request says everything that is asked for: put the settings into it, dataclasses.replace(request, …)")
        else:
            request = input_ids
        return self.loop.stream(request.ready(self.model), prefix, Watch() if trace else None)

    def generate(self, input_ids: Sequence[int] | Tensor | Request, max_new_tokens: int = 128, **settings: Unpack[Settings]) -> Generation:
        """Go on from `input_ids` (a list, or a tensor [T] or [1, T]), or carry out a whole `Request`.

        settings: the other fields of a `Request`: temperature, top_p, top_k, seed, stop, end_on_repeat, ignore_eos.
        Raises: DecodeError for a request that makes no sense.
        """
        return Generation.of(self.stream(input_ids, max_new_tokens, **settings))


def _recipe_of(mask: SkipMask, model: ModelAdapter, draft_length: int, exit_policy: Exit | None) -> Recipe:
    if mask.n_layers != model.spec.n_layers:
        raise MaskError(f"the mask is for {mask.n_layers} layers and {model.spec.id} has {model.spec.n_layers}: tune one for this model")
    if not is_whole(draft_length) or not 1 <= draft_length <= MOST_DRAFTED:
        raise DecodeError(f"draft_length is {draft_length!r}; a round drafts a whole number of tokens, 1 to {MOST_DRAFTED} "
                          "(no profile at all is plain decoding)")
    return Recipe((Skip.of(mask, int(draft_length), exit_policy or make_exit("adaptive")),))
