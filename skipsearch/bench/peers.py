"""Who takes part in a benchmark: this engine plain and with a profile, our other engines, and Hugging Face's own ways to generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skipsearch.bench.hugging_face import ALONE, HFGenerate
from skipsearch.decoding import Decoder
from skipsearch.engine import ENGINES
from skipsearch.errors import DecodeError
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.names import unknown
from skipsearch.profile import Profile
from skipsearch.stats import DecodeStats

ON_OUR_ENGINE = ("plain", "profile", "skip")
SKIP_DRAFTS = 4  # of the peer `skip`
PEERS = (*ON_OUR_ENGINE, *(f"{name}@{engine}" for name in ON_OUR_ENGINE for engine in ENGINES), *ALONE)
Opener = Callable[[str], ModelAdapter]


@dataclass(frozen=True)
class Run:
    """One peer on one prompt. first_token: seconds until the first token; decode: seconds of those behind it."""

    tokens: list[int]
    first_token: float
    decode: float
    stats: DecodeStats | None = None


class Peer(Protocol):
    name: str
    model: ModelAdapter

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """Exactly `new_tokens` greedy tokens, whatever they are, so that all peers do the same work."""


class OurPeer:
    def __init__(self, name: str, decoder: Decoder):
        self.name, self.model, self.decoder = name, decoder.model, decoder

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        result = self.decoder.generate(prompt, new_tokens, ignore_eos=True)
        return Run(result.tokens, result.stats.prefill_seconds, result.stats.decode_seconds, result.stats)


class TheirPeer:
    def __init__(self, name: str, model: ModelAdapter):
        self.name, self.model, self.generator = name, model, HFGenerate(name, model)

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        return Run(*self.generator.run(prompt, new_tokens))


def make_peers(names: Sequence[str], engine: str, profile: Profile | None, open_model: Opener, exact: bool = False) -> list[Peer]:
    """engine: of the peers that name none. open_model: a model by engine, the same object for the same name. exact: of ours.

    Raises: DecodeError for an unknown peer, one named twice, or `profile` without one; ModelError where an engine cannot drive the model.
    """
    peers: list[Peer] = []
    for i, name in enumerate(names):
        if name not in PEERS:
            raise DecodeError(unknown("peer", name, PEERS))
        if name in names[:i]:
            raise DecodeError(f"the peer {name} is named twice; one run of it serves")
        if name in ALONE:
            peers.append(TheirPeer(name, open_model("hf")))
            continue
        kind, _, other = name.partition("@")
        if kind == "profile" and profile is None:
            raise DecodeError(f"the peer `{name}` needs --profile FILE")
        peers.append(OurPeer(name, _decoder(kind, open_model(other or engine), profile, exact)))
    return peers


def _decoder(kind: str, model: ModelAdapter, profile: Profile | None, exact: bool) -> Decoder:
    """skip: every second sub-layer left out, of both kinds alike, and a fixed draft length; a mask that nobody searched."""
    if kind != "skip":
        return Decoder(model, profile if kind == "profile" else None, exact=exact)
    n = model.spec.n_layers
    mask = SkipMask(n, attn=tuple(range(1, n, 2)), mlp=tuple(range(0, n, 2)))
    return Decoder(model, mask, draft_length=SKIP_DRAFTS, exit_policy=make_exit("fixed"), exact=exact)
