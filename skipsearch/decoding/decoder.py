"""`Decoder`: what people call. A model, and a profile, a recipe, a bare mask or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from skipsearch.decoding.arguments import check_model, wrong_profile
from skipsearch.decoding.loop import Chunk, DecodeLoop, Generation, checked_prompt
from skipsearch.decoding.sampling import Sampling, is_whole
from skipsearch.decoding.stopping import Stopper
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


class Decoder:
    """Decodes with `model`, drafting as a profile says; the tokens are the full model's own.

    profile: a Profile; a Recipe; a SkipMask, which is a recipe of one skip drafter with `draft_length` (12) and `exit_policy` (Draft &
    Verify's adaptive one); None for plain decoding on the same engine, which is also what a profile with `verdict: plain` asks for.
    exact: greedy tokens are the same to the bit with any profile and with none, in every dtype; costs passes of eight rows.
    prices: what the guard weighs each drafter's rounds by (`decoding/guard.py`), a profile's own if None; () is no guard. A bare mask or
    recipe has none. modules: folders in which the trained parts that a recipe names are looked for; a profile that was loaded from a file
    knows its own.
    Any number of threads may use one decoder, or decoders of their own over one model.
    Raises: ProfileError for a profile of another model, MaskError for a mask of another depth, ModuleError for a trained part that is not
    there, is damaged, or was trained for another model.
    """

    def __init__(self, model: ModelAdapter, profile: Profile | Recipe | SkipMask | None = None, *, draft_length: int | None = None,
                 exit_policy: Exit | None = None, exact: bool = False, prices: Sequence[Price | None] | None = None,
                 modules: Sequence[Path] = ()):
        check_model(model)
        self.model = model
        self.warnings: list[str] = []
        if isinstance(profile, SkipMask):
            profile = _recipe_of(profile, model, DEFAULT_DRAFT_LENGTH if draft_length is None else draft_length, exit_policy)
        elif draft_length is not None or exit_policy is not None:
            raise DecodeError("draft_length and exit_policy belong to a bare mask; a profile or recipe has its own")
        if isinstance(profile, Profile):
            from skipsearch.decoding.matching import check_profile

            self.warnings = check_profile(profile, model)
            prices = profile.prices if prices is None else prices
            modules = (*modules, *profile.folders)
            profile = profile.recipe
        if profile is not None and not isinstance(profile, Recipe):
            raise wrong_profile(profile)
        self.recipe = profile or Recipe()
        self.loop = DecodeLoop(model, self.recipe, exact, prices or (), modules)

    def stream(self, input_ids: Sequence[int] | Tensor, max_new_tokens: int = 128, temperature: float = 0.0, top_p: float = 1.0,
               top_k: int = 0, seed: int = 0, stop: str | Sequence[str] | None = None, end_on_repeat: int | None = None,
               ignore_eos: bool = False) -> Iterator[Chunk]:
        """As `generate`, a chunk a round. Raises: DecodeError before the first chunk."""
        ids, room = checked_prompt(input_ids, self.model, max_new_tokens)
        if not is_whole(seed) or not -2**63 <= seed < 2**64:
            raise DecodeError(f"seed is {seed!r}; a seed is a whole number of at most 64 bits")
        eos = () if ignore_eos else self.model.spec.eos_token_ids
        stopper = Stopper(room, eos, stop, self.model.tokenizer, end_on_repeat)
        return self.loop.stream(ids, Sampling(temperature, top_p, top_k), stopper, int(seed))

    def generate(self, input_ids: Sequence[int] | Tensor, max_new_tokens: int = 128, temperature: float = 0.0, top_p: float = 1.0,
                 top_k: int = 0, seed: int = 0, stop: str | Sequence[str] | None = None, end_on_repeat: int | None = None,
                 ignore_eos: bool = False) -> Generation:
        """Go on from `input_ids` (a list, or a tensor [T] or [1, T]).

        max_new_tokens: exact limit, cut down to what the model's context leaves. temperature 0 is greedy. A seed repeats a sample
        with one profile; across profiles samples differ while their distribution does not. stop: strings that end the text, left
        out of it.
        end_on_repeat: end at the first n-gram of this length that the generation has already written.
        Raises: DecodeError for a request that makes no sense.
        """
        chunks = list(self.stream(input_ids, max_new_tokens, temperature, top_p, top_k, seed, stop, end_on_repeat, ignore_eos))
        last = chunks[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        text = None if last.text is None else "".join(c.text or "" for c in chunks)
        return Generation([t for c in chunks for t in c.tokens], last.finish_reason, last.stats, text)


def _recipe_of(mask: SkipMask, model: ModelAdapter, draft_length: int, exit_policy: Exit | None) -> Recipe:
    if mask.n_layers != model.spec.n_layers:
        raise MaskError(f"the mask is for {mask.n_layers} layers and {model.spec.id} has {model.spec.n_layers}: tune one for this model")
    if not is_whole(draft_length) or not 1 <= draft_length <= MOST_DRAFTED:
        raise DecodeError(f"draft_length is {draft_length!r}; a round drafts a whole number of tokens, 1 to {MOST_DRAFTED} "
                          "(no profile at all is plain decoding)")
    return Recipe((Skip.of(mask, int(draft_length), exit_policy or make_exit("adaptive")),))
