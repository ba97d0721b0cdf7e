"""`Decoder` generates text with a model, and drafts by a profile, a recipe or a skip mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DrafterCost
from skipsearch.decoding.batch import Batch, run_batch
from skipsearch.decoding.loop import Chunk, DecodeLoop, Generation
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.decoding.request import Request, RequestOptions
from skipsearch.decoding.session import Session
from skipsearch.decoding.tracing import Trace
from skipsearch.decoding.validation import check_model, profile_type_error
from skipsearch.drafters import LearningDrafter
from skipsearch.drafters.exits import Exit, make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import refuse_unless_exact
from skipsearch.engine.sampler import is_integral
from skipsearch.errors import DecodeError, MaskError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.profile import Profile

DEFAULT_DRAFT_LENGTH = 12  # Draft & Verify's K
MAX_DRAFT_LENGTH = 64
MAX_REMEMBERED_TOKENS = 10**7  # up to 300 bytes of memory each


class Decoder:
    """A decoder that drafts by a profile and generates the full model's tokens.

    profile: a Profile, a Recipe, or a SkipMask. A SkipMask is a recipe of one skip drafter with
    `draft_length` (default 12) and `exit_policy` (default: Draft & Verify's adaptive policy). None:
    plain decoding on the same engine, as with a profile whose verdict is `plain`.

    exact: greedy tokens are equal for every profile and for plain decoding, in every dtype. On the
    engine native, this is free; on other engines, every pass of the full model has eight rows.

    drafter_costs: costs of each drafter's rounds for the guard (`decoding/guard.py`). None: the
    costs in the profile; a mask or a recipe has no costs. (): no guard.

    module_folders: folders with the trained modules that a recipe names. A profile that was loaded
    from a file has its own folders.

    remember_tokens: number of tokens of earlier answers from which lookup may copy, which helps if
    requests are similar; 0: requests share nothing. The time of a request reveals what is copied,
    so a decoder with a memory should serve only one user.

    draft_forced: draft the tokens about which a request's constraint leaves no choice, before the
    drafters of the recipe, and without a recipe, too. False for a baseline that drafts nothing.

    Any number of threads may use one decoder, or several decoders with one model.

    Raises: ProfileError for a profile of another model; MaskError for a mask of another depth;
    ModuleError for a trained module that is missing, damaged, or trained for another model;
    DecodeError if `exact` is not possible with this machine's kernels.
    """

    def __init__(
        self,
        model: ModelAdapter,
        profile: Profile | Recipe | SkipMask | None = None,
        *,
        draft_length: int | None = None,
        exit_policy: Exit | None = None,
        exact: bool = False,
        drafter_costs: Sequence[DrafterCost | None] | None = None,
        module_folders: Sequence[Path] = (),
        remember_tokens: int = 0,
        draft_forced: bool = True,
    ):
        check_model(model)
        self.model = model
        self.warnings: list[str] = []
        self.plain_from_batch: int | None = None  # batch size from which plain decoding is faster
        if isinstance(profile, SkipMask):
            profile = _make_skip_recipe(
                profile,
                model,
                DEFAULT_DRAFT_LENGTH if draft_length is None else draft_length,
                exit_policy,
            )
        elif draft_length is not None or exit_policy is not None:
            raise DecodeError(
                "draft_length and exit_policy belong to a bare mask; a profile or recipe has its "
                "own"
            )
        if isinstance(profile, Profile):
            from skipsearch.decoding.match_model import check_profile

            self.warnings = check_profile(profile, model)
            drafter_costs = profile.drafter_costs if drafter_costs is None else drafter_costs
            module_folders = (*module_folders, *profile.module_folders)
            self.plain_from_batch = profile.plain_from_batch
            profile = profile.recipe
        if profile is not None and not isinstance(profile, Recipe):
            raise profile_type_error(profile)
        if not is_integral(remember_tokens) or not 0 <= remember_tokens <= MAX_REMEMBERED_TOKENS:
            raise DecodeError(
                f"remember_tokens is {remember_tokens!r}; it is a number of tokens up to "
                f"{MAX_REMEMBERED_TOKENS:,}, and 0 remembers nothing"
            )
        self.recipe = profile or Recipe()
        dynamic_kinds = [drafter.kind for drafter in self.recipe.drafters if drafter.dynamic_mask]
        if dynamic_kinds and model.spec.engine == "graph":
            self.warnings.append(
                f"{' and '.join(dynamic_kinds)} choose{'s' if len(dynamic_kinds) == 1 else ''} "
                "masks while decoding, and the engine graph records passes under one mask: draft "
                "passes run layer by layer until a mask stays"
            )
        self.loop = DecodeLoop(
            model,
            self.recipe,
            exact,
            drafter_costs or (),
            module_folders,
            int(remember_tokens),
            draft_forced,
        )
        if exact:
            refuse_unless_exact(model)

    @property
    def is_learning(self) -> bool:
        """Whether a drafter, such as `swift`, still learns from requests.

        If so, speed depends on the order of requests.
        """
        return any(drafter.is_learning for drafter in self._learning_drafters())

    @property
    def has_shared_state(self) -> bool:
        """Whether the drafts of a request depend on earlier requests. Its sample then does, too."""
        shared = any(
            getattr(getattr(drafter, "exit", None), "shared_across_requests", False)
            for drafter in self.recipe.drafters
        )
        return shared or bool(self._learning_drafters()) or self.loop.answer_memory is not None

    def _learning_drafters(self) -> list[LearningDrafter]:
        return [d for _, d in self.loop.drafters if isinstance(d, LearningDrafter)]

    def new_session(self) -> Session:
        """Return a session for successive requests, such as the turns of a chat.

        The shared prefix of their prompts is computed once.
        """
        return Session(self.stream)

    def new_batch(self, max_requests: int, max_slots: int | None = None) -> Batch:
        """Return a batch of at most `max_requests` requests.

        max_slots: slots of all rows of the shared cache together; None: no limit. A request that
        becomes too long for its row continues in a separate cache.
        """
        return Batch(self.loop, max_requests, self.plain_from_batch, max_slots)

    def generate_batch(
        self, requests: Sequence[Request], max_requests: int = 8
    ) -> list[Generation]:
        """Generate answers to all requests, at most `max_requests` at a time, in their order.

        Raises: DecodeError if a value of a request is not allowed.
        """
        return run_batch(self.new_batch(max(1, min(max_requests, len(requests)))), requests)

    def stream(
        self,
        input_ids: Sequence[int] | Tensor | Request,
        max_new_tokens: int | None = None,
        *,
        trace: bool = False,
        prefix_cache: PrefixCache | None = None,
        prompt_rows: int | None = None,
        **settings: Unpack[RequestOptions],
    ) -> Iterator[Chunk]:
        """Generate as `generate` does, and yield a chunk for each round.

        max_new_tokens: None: the default of `Request`. trace: each chunk includes the proposal of
        its round. prefix_cache: is read and updated. A session has a prefix cache of its own.
        prompt_rows: most tokens of the prompt in a pass; a chunk without tokens follows each pass
        but the last. None: one pass, as transformers has.

        Raises: DecodeError before the first chunk.
        """
        if not isinstance(input_ids, Request):
            request = Request(input_ids, **settings)
            if max_new_tokens is not None:
                request = replace(request, max_new_tokens=max_new_tokens)
        elif settings or max_new_tokens is not None:
            raise DecodeError(
                "a Request says everything that is asked for: put the settings into it, "
                "dataclasses.replace(request, …)"
            )
        else:
            request = input_ids
        return self.loop.stream(
            request.prepare(self.model), prefix_cache, Trace() if trace else None, prompt_rows
        )

    def generate(
        self,
        input_ids: Sequence[int] | Tensor | Request,
        max_new_tokens: int | None = None,
        *,
        prefix_cache: PrefixCache | None = None,
        **settings: Unpack[RequestOptions],
    ) -> Generation:
        """Generate text after `input_ids` (a list, or a tensor [T] or [1, T]), or run a `Request`.

        settings: the other fields of a `Request`: temperature, top_p, top_k, seed, stop,
        end_on_repeat, ignore_eos, processors, max_seconds, constraint. Raises: DecodeError if a
        value is not allowed."""
        return Generation.from_chunks(
            self.stream(input_ids, max_new_tokens, prefix_cache=prefix_cache, **settings)
        )


def _make_skip_recipe(
    mask: SkipMask, model: ModelAdapter, draft_length: int, exit_policy: Exit | None
) -> Recipe:
    if mask.n_layers != model.spec.n_layers:
        raise MaskError(
            f"the mask is for {mask.n_layers} layers and {model.spec.id} has "
            f"{model.spec.n_layers}: tune one for this model"
        )
    if not is_integral(draft_length) or not 1 <= draft_length <= MAX_DRAFT_LENGTH:
        raise DecodeError(
            f"draft_length is {draft_length!r}; a round drafts a whole number of tokens, 1 to "
            f"{MAX_DRAFT_LENGTH} "
            "(no profile at all is plain decoding)"
        )
    return Recipe((Skip.from_mask(mask, int(draft_length), exit_policy or make_exit("adaptive")),))
