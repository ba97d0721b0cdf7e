"""`ss.attach`: `model.generate` itself drafts, for whoever calls it, and is as it was after
`ss.detach`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from decoding.round_counts import counted
from helpers.draft_models import draft_spec, prune_layers
from helpers.letter_tokenizer import letter_tokenizer
from helpers.tiny import LAYERS, tiny_llama
from transformers import GenerationConfig, LogitsProcessorList, pipeline

import skipsearch as ss
from skipsearch.errors import ModelError, ProfileError, UnsupportedRequest

MASK = ss.SkipMask(LAYERS, (1, 3), (2,))
IDS = torch.tensor([[5, 17, 40, 3]])


@pytest.fixture
def drafted() -> Iterator[list[int]]:
    """Tokens drafted by each request since."""
    with counted("drafted") as found:
        yield found


def test_generate_drafts_until_it_is_detached(drafted: list[int]) -> None:
    model = tiny_llama()
    expected = model.generate(IDS, max_new_tokens=20).tolist()
    ss.attach(model, MASK)
    assert model.generate(IDS, max_new_tokens=20).tolist() == expected
    assert (
        model.generate(IDS, GenerationConfig(max_new_tokens=20), LogitsProcessorList([])).tolist()
        == expected
    )
    assert (
        model.generate(
            input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=20
        ).tolist()
        == expected
    )
    assert sum(drafted) > 20
    drafted.clear()
    ss.detach(model)
    ss.detach(model)
    assert model.generate(IDS, max_new_tokens=20).tolist() == expected
    assert not drafted
    assert "generate" not in model.__dict__


def test_what_is_not_carried_out_falls_back_unless_it_is_to_be_refused(drafted: list[int]) -> None:
    model = tiny_llama()
    expected = model.generate(IDS, max_new_tokens=8, num_beams=3).tolist()
    ss.attach(model, MASK)
    assert model.generate(IDS, max_new_tokens=8, num_beams=3).tolist() == expected
    assert not drafted
    ss.attach(model, MASK, fallback=False)
    with pytest.raises(UnsupportedRequest, match="num_beams is 3"):
        model.generate(IDS, max_new_tokens=8, num_beams=3)


def test_a_pipeline_works_through_it(drafted: list[int]) -> None:
    model, tokenizer = tiny_llama(), letter_tokenizer()
    tokenizer.pad_token = "</s>"
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    expected = write("def f(x", max_new_tokens=12, do_sample=False)
    ss.attach(model, MASK)
    assert write("def f(x", max_new_tokens=12, do_sample=False) == expected
    assert sum(drafted) > 0


def test_a_draft_model_in_memory_drafts(drafted: list[int]) -> None:
    model, small = tiny_llama(), prune_layers(tiny_llama(), 3)
    expected = model.generate(IDS, max_new_tokens=20).tolist()
    adapter = ss.adapt(small)
    recipe = ss.Recipe((draft_spec(adapter),))
    del adapter
    ss.attach(model, recipe, draft_model=small)
    assert model.generate(IDS, max_new_tokens=20).tolist() == expected
    assert sum(drafted) > 0
    copied = copy.deepcopy(model)
    ss.detach(model)
    assert copied.generate(IDS, max_new_tokens=20).tolist() == expected
    with pytest.raises(ModelError, match=r"3 layers .* has 2 layers"):
        ss.generate(model, IDS, recipe, draft_model=prune_layers(tiny_llama(), 2))
    with pytest.raises(ModelError, match="no drafter draft-model"):
        ss.generate(model, IDS, MASK, draft_model=small)


def test_what_cannot_be_attached_is_refused_in_one_sentence() -> None:
    with pytest.raises(ModelError, match="a str is not a Hugging Face model"):
        ss.attach("demo", MASK)  # type: ignore[arg-type]
    for profile, sentence in (("x.yaml", "load it first"), (None, "attach needs a profile")):
        with pytest.raises(ProfileError, match=sentence):
            ss.attach(tiny_llama(), profile)  # type: ignore[arg-type]
