"""Every peer of a benchmark does the same work: exactly so many greedy tokens, an end-of-sequence token among them or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

import skipsearch as ss
from skipsearch.bench import PEERS, make_peers
from skipsearch.errors import DecodeError
from skipsearch.models import ModelAdapter


@cache
def demo(engine: str) -> ModelAdapter:
    return ss.load_model("demo", device="cpu", dtype="float32", engine=engine)


def opener() -> Callable[[str], ModelAdapter]:
    return lambda engine: demo("lean" if engine == "auto" else engine)


def prompt() -> list[int]:
    return list(demo("hf").tokenizer("import os\n\ndef main(argv=None):")["input_ids"])


def test_peers_write_the_same_tokens_and_go_on_behind_an_end_of_sequence_token() -> None:
    hf = demo("hf")
    plain, = make_peers(["plain"], "hf", None, opener())
    tokens = plain.run(prompt(), 12).tokens
    generation = hf.model.generation_config  # type: ignore[attr-defined]
    before, generation.eos_token_id = generation.eos_token_id, tokens[3]
    try:
        stopping = ss.adapt(hf.model, hf.tokenizer)  # type: ignore[attr-defined]
        names = ["plain", "hf-generate", "hf-lookup", "hf-early-exit"]
        for peer in make_peers(names, "hf", None, lambda engine: stopping):
            run = peer.run(prompt(), 12)
            assert run.tokens == tokens, peer.name
            assert run.first_token > 0
            assert run.decode > 0
    finally:
        generation.eos_token_id = before
    assert len(tokens) == 12


def test_a_peer_may_name_another_engine() -> None:
    plain, other = make_peers(["plain", "plain@hf"], "auto", None, opener())
    assert (plain.model.spec.engine, other.model.spec.engine) == ("lean", "hf")
    assert plain.run(prompt(), 6).tokens == other.run(prompt(), 6).tokens


@pytest.mark.parametrize(("names", "sentence"), [
    (["hf-generat"], "did you mean hf-generate"),
    (["plain@warp"], "no peer called 'plain@warp'"),
    (["profile"], "the peer `profile` needs --profile FILE"),
    (["profile@hf"], "the peer `profile@hf` needs --profile FILE"),
    (["plain", "plain"], "the peer plain is named twice"),
    (["hf-compile"], "hf-compile cannot take part on a CPU"),
])
def test_a_peer_that_cannot_take_part_is_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(DecodeError, match=sentence):
        make_peers(names, "auto", None, opener())


def test_hugging_faces_peers_need_a_hugging_face_model() -> None:
    with pytest.raises(DecodeError, match="not held as a Hugging Face model"):
        make_peers(["hf-generate"], "auto", None, lambda engine: demo("lean"))


def test_the_unsearched_mask_leaves_out_every_second_sub_layer() -> None:
    plain, skip = make_peers(["plain", "skip"], "auto", None, opener())
    run = skip.run(prompt(), 24)
    assert run.tokens == plain.run(prompt(), 24).tokens
    assert run.stats is not None
    assert run.stats.drafted > run.stats.accepted > 0
    mask = skip.decoder.recipe.mask(20)
    assert mask is not None
    assert mask.n_skipped == 20
    assert len(mask.attn) == len(mask.mlp) == 10


def test_every_engine_has_a_plain_and_a_drafting_peer() -> None:
    assert {"plain", "profile", "plain@hf", "plain@lean", "plain@compiled", "plain@graph", "profile@compiled"} < set(PEERS)
