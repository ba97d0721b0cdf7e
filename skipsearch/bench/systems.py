"""The systems of a benchmark.

They are our engines, plain or with a recipe, transformers' `generate`, and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skipsearch.bench.hugging_face import GENERATE_VARIANTS, HFGenerate
from skipsearch.bench.llama_cpp import NAMES as BY_LLAMA_CPP
from skipsearch.bench.llama_cpp import LlamaCpp, LlamaGenerate
from skipsearch.core.recipe import DRAFTERS, Recipe
from skipsearch.core.registry import unknown_name
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.decoding.match_model import check_profile
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine import ENGINES
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.quantize import native_bits
from skipsearch.profile import Profile, load_profile

PROFILE_SYSTEMS = ("profile", *(f"profile:{kind}" for kind in DRAFTERS))
OWN_SYSTEMS = ("plain", "skip", "lookup", "lookup+skip", *PROFILE_SYSTEMS)
LOOKUP_SPEC = Lookup(min_match=2, draft_length=8)  # of the systems `lookup` and `lookup+skip`
SKIP_DRAFT_LENGTH = 4  # of `skip` and `lookup+skip`
SYSTEMS = (
    *OWN_SYSTEMS,
    *(f"{name}@{engine}" for name in OWN_SYSTEMS for engine in ENGINES),
    *GENERATE_VARIANTS,
    *BY_LLAMA_CPP,
)
PLAIN_WEIGHTS = "plain weights"  # takes the place of an engine in a call of `load_model`
ModelLoader = Callable[[str], ModelAdapter]


@dataclass(frozen=True)
class SystemRun:
    """The result of one system on one prompt.

    first_token_s: seconds to the first token.
    decode_s: seconds of the tokens after it.
    """

    tokens: list[int]
    first_token_s: float
    decode_s: float
    stats: DecodeStats | None = None


class System(Protocol):
    """A system that takes part in a benchmark.

    engine: name of the engine, or of the program, that runs its passes.
    model: an adapter of the same model, which gives its facts and the bytes of its weights.
    """

    name: str
    engine: str
    model: ModelAdapter

    def run(self, prompt: Sequence[int], new_tokens: int) -> SystemRun:
        """Generate exactly `new_tokens` greedy tokens, also after an end-of-sequence token.

        All systems therefore do the same work.
        """


class SkipsearchSystem:
    """A system that decodes with our decoder, plainly or with a recipe."""

    def __init__(self, name: str, decoder: Decoder):
        self.name, self.engine, self.model, self.decoder = (
            name,
            decoder.model.spec.engine,
            decoder.model,
            decoder,
        )

    def run(self, prompt: Sequence[int], new_tokens: int) -> SystemRun:
        result = self.decoder.generate(prompt, new_tokens, ignore_eos=True)
        return SystemRun(
            result.tokens, result.stats.prefill_seconds, result.stats.decode_seconds, result.stats
        )


class ExternalSystem:
    """A system that decodes with another library: transformers or llama.cpp.

    llama: the llama.cpp model; None for transformers.
    """

    def __init__(
        self, name: str, engine: str, model: ModelAdapter, generator: HFGenerate | LlamaGenerate
    ):
        self.name, self.engine, self.model, self.generator = name, engine, model, generator
        self.llama = generator.llama if isinstance(generator, LlamaGenerate) else None

    def run(self, prompt: Sequence[int], new_tokens: int) -> SystemRun:
        return SystemRun(*self.generator.run(prompt, new_tokens))


def make_systems(
    names: Sequence[str],
    engine: str,
    profile: Profile | None,
    load_model: ModelLoader,
    exact: bool = False,
    gguf: Path | None = None,
) -> list[System]:
    """Make the systems with these names.

    engine: the engine of the systems whose names have none.
    load_model: returns the model on an engine, the same object for the same name. For
    `PLAIN_WEIGHTS` it returns the unquantized weights in Hugging Face's modules: llama.cpp makes
    its quantized weights from them.
    exact: our own systems decode with Decoder(exact=True), so that greedy tokens are equal to the
    bit.
    gguf: the GGUF file of the model, which llama.cpp reads, too; None for any other model.

    A name that ends with `.yaml` is the file of another profile of the model.

    Raises: DecodeError for an unknown system, one named twice, or one that the profile has no
    recipe for; ProfileError for another profile that cannot be read or does not fit the model;
    ModelError if the engine cannot run the model.
    """
    systems: list[System] = []
    llama: LlamaCpp | None = None
    for name in names:
        is_file = name.endswith(".yaml")
        kind, _, other = ("profile", "", "") if is_file else name.partition("@")
        if name not in SYSTEMS and not is_file:
            raise DecodeError(unknown_name("system", name, SYSTEMS))
        if names.count(name) > 1:
            raise DecodeError(f"the system {name} is named twice; one run of it serves")
        if name in GENERATE_VARIANTS:
            systems.append(
                ExternalSystem(name, "hf", load_model("hf"), HFGenerate(name, load_model("hf")))
            )
            continue
        if name in BY_LLAMA_CPP:
            bits = native_bits(load_model(engine).spec.quantization)
            theirs = load_model(engine if bits or gguf else "hf")
            if llama is None:
                weights = load_model(PLAIN_WEIGHTS) if bits else theirs
                llama = LlamaCpp(weights, bits, gguf)
            systems.append(
                ExternalSystem(name, "llama.cpp", theirs, LlamaGenerate(name, llama))
            )  # the weights of `theirs` have as many bytes as llama.cpp's
            continue
        used = load_profile(name) if is_file else profile
        if kind in PROFILE_SYSTEMS and used is None:
            raise DecodeError(f"the system `{name}` needs --profile FILE")
        model = load_model(other or engine)
        decoder = (
            _make_profile_decoder(name, kind, used, model, exact)
            if used and kind in PROFILE_SYSTEMS
            else Decoder(model, _unsearched_recipe(kind, model.spec.n_layers), exact=exact)
        )
        systems.append(SkipsearchSystem(name, decoder))
    return systems


def _make_profile_decoder(
    name: str, kind: str, profile: Profile, model: ModelAdapter, exact: bool
) -> Decoder:
    """Return the decoder that `chat` and `serve` use, or one with one kind of drafter alone.

    Raises: DecodeError if the profile has no drafter of that kind; ProfileError if it does not fit
        the model.
    """
    check_profile(profile, model)
    part = kind.partition(":")[2]
    chosen = [
        (drafter, cost)
        for drafter, cost in zip(profile.drafters, profile.drafter_costs, strict=False)
        if part in ("", drafter.kind)
    ]
    if part and not chosen:
        raise DecodeError(
            f"the system `{name}` needs a profile that drafts by {part}, and this one's recipe is "
            f"{profile.recipe}: leave that "
            "system out"
        )
    return Decoder(
        model,
        Recipe(tuple(drafter for drafter, _ in chosen)),
        exact=exact,
        drafter_costs=[cost for _, cost in chosen],
        module_folders=profile.module_folders,
    )


def _unsearched_recipe(kind: str, n_layers: int) -> Recipe:
    """Return the default recipe of a kind, without a search.

    Its `skip` drafter skips every second attention and every second MLP and has a fixed draft
    length.
    """
    skip = Skip(
        attn=tuple(range(1, n_layers, 2)),
        mlp=tuple(range(0, n_layers, 2)),
        draft_length=SKIP_DRAFT_LENGTH,
        exit=Fixed(),
    )
    return {
        "plain": Recipe(),
        "skip": Recipe((skip,)),
        "lookup": Recipe((LOOKUP_SPEC,)),
        "lookup+skip": Recipe((LOOKUP_SPEC, skip)),
    }[kind]
