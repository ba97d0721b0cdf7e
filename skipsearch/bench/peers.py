"""Who takes part in a benchmark: this engine plain, this engine with a profile, and Hugging Face's own `generate`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from skipsearch.decoding import Decoder
from skipsearch.errors import DecodeError
from skipsearch.evaluation.latency import synchronize
from skipsearch.models.spec import ModelAdapter
from skipsearch.names import unknown
from skipsearch.profile import Profile
from skipsearch.stats import DecodeStats

PEERS = ("plain", "profile", "hf-generate")


@dataclass(frozen=True)
class Run:
    """One peer on one prompt. first_token: seconds until the first token; decode: seconds of those behind it."""

    tokens: list[int]
    first_token: float
    decode: float
    stats: DecodeStats | None = None


class Peer(Protocol):
    name: str

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """Exactly `new_tokens` greedy tokens, whatever they are, so that all peers do the same work."""


class OurPeer:
    def __init__(self, name: str, decoder: Decoder):
        self.name, self.decoder = name, decoder

    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        result = self.decoder.generate(prompt, new_tokens, ignore_eos=True)
        return Run(result.tokens, result.stats.prefill_seconds, result.stats.decode_seconds, result.stats)


class _Clock:
    """A streamer that notes when the first token came. `generate` hands it the prompt first."""

    def __init__(self, device: torch.device):
        self.device, self.calls, self.first = device, 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            synchronize(self.device)
            self.first = perf_counter()

    def end(self) -> None:
        pass


class HFGenerate:
    """transformers' `generate(do_sample=False)` with its default dynamic cache."""

    name = "hf-generate"

    def __init__(self, model: ModelAdapter):
        hf_model = getattr(model, "model", None)
        if hf_model is None:
            raise DecodeError(f"{model.spec.id} is not held as a Hugging Face model, so hf-generate cannot take part")
        self.model, self.device = hf_model, model.spec.device
        # Not `min_new_tokens`: that forbids the end-of-sequence token, which the other peers may write and go on behind. Not None either:
        # `generate` would fill in the model's own. So the id that no token has.
        self.config = copy.deepcopy(hf_model.generation_config)
        self.config.update(eos_token_id=model.spec.vocab, do_sample=False, num_beams=1)

    @torch.no_grad()
    def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        ids = torch.tensor([list(prompt)], device=self.device)
        clock = _Clock(self.device)
        self.config.max_new_tokens = new_tokens
        synchronize(self.device)
        started = perf_counter()
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self.config, streamer=clock)
        synchronize(self.device)
        ended = perf_counter()
        return Run(out[0, ids.shape[1]:].tolist(), clock.first - started, ended - clock.first)


def make_peers(names: Sequence[str], model: ModelAdapter, profile: Profile | None) -> list[Peer]:
    """Raises: DecodeError for an unknown peer, or `profile` without one."""
    peers: list[Peer] = []
    for name in names:
        if name not in PEERS:
            raise DecodeError(unknown("peer", name, PEERS))
        if name == "profile" and profile is None:
            raise DecodeError("the peer `profile` needs --profile FILE")
        if name == "hf-generate":
            peers.append(HFGenerate(model))
        else:
            peers.append(OurPeer(name, Decoder(model, profile if name == "profile" else None)))
    return peers
