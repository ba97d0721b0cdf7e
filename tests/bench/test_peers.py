"""Every peer of a benchmark does the same work: exactly so many greedy tokens, an end-of-sequence token among them or not."""

import pytest

import skipsearch as ss
from skipsearch.bench import PEERS, make_peers
from skipsearch.errors import DecodeError


@pytest.fixture
def model():
    return ss.load_model("demo", device="cpu", dtype="float32", engine="hf")


def test_peers_write_the_same_tokens_and_go_on_behind_an_end_of_sequence_token(model):
    prompt = model.tokenizer("import os\n\ndef main(argv=None):")["input_ids"]
    plain, hf = make_peers(["plain", "hf-generate"], model, None)
    tokens = plain.run(prompt, 12).tokens
    model.model.generation_config.eos_token_id = tokens[3]
    stopping = ss.adapt(model.model, model.tokenizer)
    again, hf = make_peers(["plain", "hf-generate"], stopping, None)
    assert again.run(prompt, 12).tokens == hf.run(prompt, 12).tokens == tokens
    assert len(tokens) == 12


def test_an_unknown_peer_gets_the_nearest_name(model):
    with pytest.raises(DecodeError, match="did you mean hf-generate"):
        make_peers(["hf-generat"], model, None)


def test_the_profile_peer_needs_a_profile(model):
    assert "profile" in PEERS
    with pytest.raises(DecodeError, match="--profile"):
        make_peers(["profile"], model, None)
