"""`ss.generate` stands in for `model.generate` of a Hugging Face model in memory."""

import pytest
import torch

import skipsearch as ss
from skipsearch.errors import DecodeError


@pytest.fixture(scope="module")
def demo():
    return ss.load_model("demo", device="cpu", dtype="float32", engine="hf")


@pytest.fixture(scope="module")
def prompt(demo):
    return torch.tensor([demo.tokenizer("import os\n\ndef main(argv=None):")["input_ids"]])


class Recorder:
    def __init__(self):
        self.received, self.ended = [], False

    def put(self, value):
        self.received += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_greedy_tokens_equal_those_of_the_models_own_generate(demo, prompt):
    mask = ss.SkipMask.whole_layers(20, (9, 11, 13))
    ours = ss.generate(demo.model, prompt, profile=mask, max_new_tokens=40)
    theirs = demo.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40)
    assert ours.tolist() == theirs.tolist()


def test_a_streamer_gets_the_prompt_and_every_token(demo, prompt):
    streamer = Recorder()
    out = ss.generate(demo.model, prompt, max_new_tokens=8, streamer=streamer)
    assert streamer.received == out.flatten().tolist()
    assert streamer.ended


def test_end_of_sequence_ids_of_the_request_are_followed(demo, prompt):
    free = ss.generate(demo.model, prompt, max_new_tokens=12)[0, prompt.shape[1]:].tolist()
    stopped = ss.generate(demo.model, prompt, max_new_tokens=12, eos_token_id=[free[4]])[0, prompt.shape[1]:].tolist()
    assert stopped == free[:free.index(free[4]) + 1]


@pytest.mark.parametrize(("setting", "value"), [("num_beams", 4), ("repetition_penalty", 1.2), ("min_new_tokens", 5)])
def test_a_setting_that_would_change_the_tokens_is_refused_by_name(demo, prompt, setting, value):
    with pytest.raises(DecodeError, match=setting):
        ss.generate(demo.model, prompt, max_new_tokens=4, **{setting: value})


def test_a_batch_is_refused(demo, prompt):
    with pytest.raises(DecodeError, match="one sequence"):
        ss.generate(demo.model, prompt.expand(2, -1))
