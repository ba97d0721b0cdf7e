"""Who takes part in a benchmark: this engine plain and with a profile, our other engines, Hugging Face's ways to generate, llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skipsearch.bench.hugging_face import ALONE, HFGenerate
from skipsearch.bench.llama_cpp import NAMES as BY_LLAMA_CPP
from skipsearch.bench.llama_cpp import LlamaCpp, LlamaGenerate
from skipsearch.decoding import Decoder
from skipsearch.decoding.matching import check_profile
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.engine import ENGINES, current
from skipsearch.errors import DecodeError
from skipsearch.exits.fixed import Fixed
from skipsearch.models.quantize import NATIVE
from skipsearch.models.spec import ModelAdapter
from skipsearch.names import unknown
from skipsearch.profile import Profile
from skipsearch.recipe import DRAFTERS, Recipe
from skipsearch.stats import DecodeStats

PROFILE = ("profile", "recipe", *(f"profile:{kind}" for kind in DRAFTERS))   # recipe: another name of profile
ON_OUR_ENGINE = ("plain", "skip", "lookup", "lookup+skip", *PROFILE)
LOOKUP = Lookup(min_match=2, draft_length=8)   # of the peers `lookup` and `lookup+skip`
SKIP_DRAFTS = 4                                # of `skip` and `lookup+skip`
PEERS = (*ON_OUR_ENGINE, *(f"{name}@{engine}" for name in ON_OUR_ENGINE for engine in ENGINES), *ALONE, *BY_LLAMA_CPP)
PLAIN_WEIGHTS = "plain weights"   # in the place of an engine
Opener = Callable[[str], ModelAdapter]


@dataclass(frozen=True)
class Run:
    """One peer on one prompt. first_token: seconds until the first token; decode: seconds of those behind it."""

    tokens: list[int]
    first_token: float
    decode: float
    stats: DecodeStats | None = None


class Peer(Protocol):
    """engine: what drives it, by name. model: its weights, as this program holds them."""

    name: str
    engine: str
    model: ModelAdapter

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """Exactly `new_tokens` greedy tokens, whatever they are, so that all peers do the same work."""


class OurPeer:
    def __init__(self, name: str, decoder: Decoder):
        self.name, self.engine, self.model, self.decoder = name, decoder.model.spec.engine, decoder.model, decoder

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        result = self.decoder.generate(prompt, new_tokens, ignore_eos=True)
        return Run(result.tokens, result.stats.prefill_seconds, result.stats.decode_seconds, result.stats)


class TheirPeer:
    """llama: llama.cpp, where that generates."""

    def __init__(self, name: str, engine: str, model: ModelAdapter, generator: HFGenerate | LlamaGenerate):
        self.name, self.engine, self.model, self.generator = name, engine, model, generator
        self.llama = generator.llama if isinstance(generator, LlamaGenerate) else None

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        return Run(*self.generator.run(prompt, new_tokens))


def make_peers(names: Sequence[str], engine: str, profile: Profile | None, open_model: Opener, exact: bool = False) -> list[Peer]:
    """engine: of the peers that name none. open_model: a model by engine, the same object for the same name. Of `PLAIN_WEIGHTS`, in Hugging
    Face's modules whatever the quantization, llama.cpp makes its 8 bits where the engine has 8 bits. exact: of ours.

    Raises: DecodeError for an unknown peer, one named twice, or one that the profile does not say how to make; ModelError where an engine
    cannot drive the model.
    """
    peers: list[Peer] = []
    llama: LlamaCpp | None = None
    taken: list[str] = []
    for name in names:
        kind, at, other = name.partition("@")
        other = current(other)
        if f"{kind}{at}{other}" not in PEERS:
            raise DecodeError(unknown("peer", name, PEERS))
        kind = "profile" if kind == "recipe" else kind
        if f"{kind}@{other}" in taken:
            raise DecodeError(f"the peer {name} is named twice{' (recipe is profile)' if kind == 'profile' else ''}; one run of it serves")
        taken.append(f"{kind}@{other}")
        if name in ALONE:
            peers.append(TheirPeer(name, "hf", open_model("hf"), HFGenerate(name, open_model("hf"))))
            continue
        if name in BY_LLAMA_CPP:
            eight_bits = open_model(engine).spec.quantization == NATIVE
            theirs = open_model(engine if eight_bits else "hf")
            llama = llama or LlamaCpp(open_model(PLAIN_WEIGHTS) if eight_bits else theirs, eight_bits)
            peers.append(TheirPeer(name, "llama.cpp", theirs, LlamaGenerate(name, llama)))   # its weights take as many bytes
            continue
        if kind in PROFILE and profile is None:
            raise DecodeError(f"the peer `{name}` needs --profile FILE")
        model = open_model(other or engine)
        recipe = _of_profile(name, kind, profile, model) if profile and kind in PROFILE else _unsearched(kind, model.spec.n_layers)
        peers.append(OurPeer(name, Decoder(model, recipe, exact=exact, modules=profile.folders if profile else ())))
    return peers


def _of_profile(name: str, kind: str, profile: Profile, model: ModelAdapter) -> Recipe:
    """A profile's recipe, or what one kind of drafter is of it. Raises: DecodeError if it has none of that kind; ProfileError."""
    check_profile(profile, model)
    drafters, part = profile.drafters, kind.partition(":")[2]
    if not part:
        return profile.recipe
    chosen = tuple(drafter for drafter in drafters if drafter.kind == part)
    if not chosen:
        raise DecodeError(f"the peer `{name}` needs a profile that drafts by {part}, and this one's recipe is {profile.recipe}: leave that "
                          "peer out")
    return Recipe(chosen)


def _unsearched(kind: str, n_layers: int) -> Recipe:
    """skip: every second sub-layer left out, of both kinds alike, and a fixed draft length; settings that nobody searched."""
    skip = Skip(attn=tuple(range(1, n_layers, 2)), mlp=tuple(range(0, n_layers, 2)), draft_length=SKIP_DRAFTS, exit=Fixed())
    return {"plain": Recipe(), "skip": Recipe((skip,)), "lookup": Recipe((LOOKUP,)), "lookup+skip": Recipe((LOOKUP, skip))}[kind]
