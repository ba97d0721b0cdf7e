"""`ss.generate` stands in for `model.generate` of a Hugging Face model in memory: the same tokens,
or a refusal by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.byte_tokenizer import byte_tokenizer, byte_tokens
from helpers.tiny import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny import LAYERS, VOCAB, hf_model, new_hf_model, some_tokens
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

import skipsearch as ss
from skipsearch.errors import DecodeError, ModelError, ProfileError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using the model-agnostic default"
)  # transformers', where no length is given
MASK = ss.SkipMask.from_layers(LAYERS, (1,))


class Recorder:
    def __init__(self) -> None:
        self.received: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.received += value.flatten().tolist()
        self.shapes.append(tuple(value.shape))

    def end(self) -> None:
        self.ended = True


def both(model: Any, *args: Any, mask: ss.SkipMask | None = MASK, **asked: Any) -> tuple[Any, Any]:
    """(ours, transformers'), of one call."""
    return ss.generate(model, *args, profile=mask, **asked), model.generate(*args, **asked)


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, Any]]:
    """A prompt and the settings of a greedy call that are carried out, or that ask for nothing."""
    length, padding = draw(st.integers(1, 24)), draw(st.sampled_from([0, 0, 1, 5]))
    ids = some_tokens(length + padding, seed=draw(st.integers(0, 20)))
    asked: dict[str, Any] = {}
    if padding or draw(st.booleans()):
        asked["attention_mask"] = torch.tensor([[0] * padding + [1] * length])
    limit = draw(st.sampled_from(["default", "new", "total", "both"]))
    if limit in ("new", "both"):
        asked["max_new_tokens"] = draw(st.integers(1, 30))
    if limit in ("total", "both"):
        asked["max_length"] = length + padding + draw(st.integers(1, 30))
    ends = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
    asked["eos_token_id"] = draw(
        st.one_of(st.none(), st.integers(0, VOCAB - 1), ends, ends.map(torch.tensor))
    )
    last = draw(st.sampled_from([None, VOCAB // 2, VOCAB // 8]))
    if last is not None:
        asked["stopping_criteria"] = [lambda ids, scores, **_: ids[:, -1] < last]
    asked |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "pad_token_id": st.just(VOCAB - 1) if "attention_mask" in asked else st.none(),
                "do_sample": st.just(False),
                "use_cache": st.just(True),
                "num_beams": st.just(1),
                "temperature": st.just(0.7),
                "synced_gpus": st.just(False),
                "renormalize_logits": st.just(True),
                "logits_processor": st.just([]),
                "suppress_tokens": st.just([]),
                "max_time": st.just(1e6),
                "min_p": st.just(0.3),
                "length_penalty": st.just(2.0),
            },
        )
    )
    return ids, asked


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["llama", "gpt2", "mistral-window", "falcon-rw", "opt"]), calls(), st.booleans()
)
def test_greedy_tokens_are_those_of_the_models_own_generate(
    name: str, call: tuple[torch.Tensor, dict[str, Any]], drafted: bool
) -> None:
    ids, asked = call
    ours, theirs = both(hf_model(name), ids, mask=MASK if drafted else None, **asked)
    assert ours.tolist() == theirs.tolist()


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_a_config_counts_as_keywords_do(data: st.DataObject) -> None:
    """The model's own, the call's, and keywords, of which the later wins."""
    model, ids = new_hf_model("llama"), some_tokens(9)
    ends = st.sampled_from([None, 5, [7, 11], list(range(30))])
    entries = st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.sampled_from([None, 3, 12]),
            "eos_token_id": ends,
            "max_length": st.sampled_from([None, 14, 22]),
            "temperature": st.just(0.5),
        },
    )
    for name, value in data.draw(entries).items():
        setattr(model.generation_config, name, value)
    asked = data.draw(entries.filter(lambda e: e.get("max_length", 1) is not None))
    if data.draw(st.booleans()):
        asked["generation_config"] = GenerationConfig(**data.draw(entries))
    ours, theirs = both(model, ids, **asked)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("length", [1, 36, 85])
def test_without_a_length_20_tokens_follow_or_what_the_context_leaves(length: int) -> None:
    ours, theirs = both(hf_model("llama"), some_tokens(length), eos_token_id=None)
    assert ours.tolist() == theirs.tolist()
    assert ours.shape[1] == min(length + 20, 96)


@pytest.mark.parametrize(
    "form", ["tensor", "row", "list", "batch", "array", "int32", "inputs", "input_ids"]
)
def test_a_prompt_is_taken_in_every_form_that_holds_one_sequence(form: str) -> None:
    model, ids = hf_model("llama"), some_tokens(6)
    expected = model.generate(ids, max_new_tokens=5).tolist()
    forms = {
        "tensor": ids,
        "row": ids[0],
        "list": ids[0].tolist(),
        "batch": ids.tolist(),
        "array": ids.numpy(),
        "int32": ids.int(),
    }
    out = (
        ss.generate(model, **{form: ids}, max_new_tokens=5)
        if form not in forms
        else ss.generate(model, forms[form], max_new_tokens=5)
    )
    assert out.dtype == torch.int64
    assert out.tolist() == expected


def test_a_tokenizers_whole_answer_is_taken_as_keywords() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    inputs = tokenizer("abc def", return_tensors="pt")
    assert {"input_ids", "attention_mask"} <= set(inputs)
    out = ss.generate(model, **inputs, profile=ss.SkipMask.from_layers(5, (2,)), max_new_tokens=9)
    assert out.tolist() == model.generate(input_ids=inputs.input_ids, max_new_tokens=9).tolist()
    zeros = torch.zeros_like(inputs.input_ids)
    assert (
        out.tolist()
        == ss.generate(model, **{**inputs, "token_type_ids": zeros}, max_new_tokens=9).tolist()
    )


def test_the_embedded_model_goes_on_from_a_text_as_transformers_does() -> None:
    demo = ss.load_model("demo", device="cpu", dtype="float32", engine="hf")
    inputs = demo.tokenizer("import os\n\ndef main(argv=None):", return_tensors="pt")
    ours, theirs = both(
        demo.model, mask=ss.SkipMask.from_layers(20, (9, 11, 13)), **inputs, max_new_tokens=16
    )  # type: ignore[attr-defined]
    assert ours.tolist() == theirs.tolist()


def test_without_a_prompt_it_starts_from_the_first_token_of_all() -> None:
    ours, theirs = both(hf_model("llama"), bos_token_id=4, max_new_tokens=5)
    assert ours.tolist() == theirs.tolist()


def test_padding_that_only_its_token_gives_away_is_hidden_as_transformers_hides_it() -> None:
    ids = torch.cat([torch.full((1, 3), 60), some_tokens(7).clamp(max=59)], dim=1)
    ours, theirs = both(hf_model("llama"), ids, pad_token_id=60, max_new_tokens=12)
    assert ours.tolist() == theirs.tolist()
    assert ours.tolist() != ss.generate(hf_model("llama"), ids, max_new_tokens=12).tolist()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.text("ab ():=", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 3)
)
def test_stop_strings_end_where_transformers_ends(strings: list[str], seed: int) -> None:
    prompt = torch.tensor([byte_tokens("abc def")])
    ours, theirs = both(
        tiny_llama(seed, layers=LAYERS),
        prompt,
        stop_strings=strings,
        tokenizer=byte_tokenizer(),
        max_new_tokens=40,
    )
    assert ours.tolist() == theirs.tolist()


def test_a_criterion_replaces_the_settings_criterion_of_its_own_type() -> None:
    at_once = StoppingCriteriaList([MaxTimeCriteria(0.0, initial_timestamp=0.0)])
    ours, theirs = both(
        hf_model("llama"),
        some_tokens(4),
        max_time=1e6,
        stopping_criteria=at_once,
        eos_token_id=None,
    )
    assert ours.tolist() == theirs.tolist()
    assert ours.shape == (1, 5)


def test_a_dict_comes_back_where_one_is_asked_for() -> None:
    ours, theirs = both(hf_model("llama"), some_tokens(4), return_dict_in_generate=True)
    assert type(ours) is type(theirs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()


def test_a_streamer_gets_what_transformers_puts() -> None:
    ours, theirs = Recorder(), Recorder()
    out = ss.generate(hf_model("llama"), some_tokens(5), MASK, max_new_tokens=8, streamer=ours)
    hf_model("llama").generate(some_tokens(5), max_new_tokens=8, streamer=theirs)
    assert ours.received == out.flatten().tolist()
    assert (ours.received, ours.shapes, ours.ended) == (theirs.received, theirs.shapes, True)


def test_transformers_own_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_tokenizer()
    out = ss.generate(
        tiny_llama(), byte_tokens("abc"), max_new_tokens=12, streamer=TextStreamer(tokenizer)
    )
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(out[0]).rstrip("\n")


def sampled(model: Any, **asked: Any) -> list[int]:
    return ss.generate(
        model, some_tokens(5), MASK, do_sample=True, max_new_tokens=24, eos_token_id=None, **asked
    )[0].tolist()


def test_torchs_seed_repeats_a_sample_and_two_calls_differ() -> None:
    model = hf_model("llama")
    torch.manual_seed(3)
    first, second = sampled(model), sampled(model)
    torch.manual_seed(3)
    assert (sampled(model), sampled(model)) == (first, second)
    assert first != second


def test_a_seed_of_the_call_repeats_its_sample_and_leaves_torchs_generator_alone() -> None:
    model, before = hf_model("llama"), torch.get_rng_state()
    assert sampled(model, seed=7) == sampled(model, seed=7) != sampled(model, seed=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_greedy_decoding_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    ss.generate(hf_model("llama"), some_tokens(5), MASK, max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("asked", "equal"),
    [
        ({}, {"top_k": 50}),
        ({"top_k": None}, {"top_k": 0}),
        ({"temperature": None, "top_p": None}, {"temperature": 1.0, "top_p": 1.0}),
        ({"typical_p": 1.0, "epsilon_cutoff": 0.0}, {}),
    ],
    ids=str,
)
def test_what_a_sampling_call_leaves_open_is_transformers_default(
    asked: dict[str, Any], equal: dict[str, Any]
) -> None:
    assert sampled(hf_model("llama"), seed=1, **asked) == sampled(
        hf_model("llama"), seed=1, **equal
    )


def test_where_every_config_is_silent_50_tokens_are_sampled_from() -> None:
    """61 tokens, of which the ten or so least likely never come."""
    model, ids = hf_model("llama"), some_tokens(5)
    least = set(model(ids).logits[0, -1].topk(VOCAB - 50, largest=False).indices.tolist())
    drawn = {
        ss.generate(model, ids, do_sample=True, max_new_tokens=1, temperature=50.0, seed=s)[
            0, -1
        ].item()
        for s in range(80)
    }
    assert not drawn & least
    assert {
        ss.generate(
            model, ids, do_sample=True, max_new_tokens=1, temperature=50.0, top_k=0, seed=s
        )[0, -1].item()
        for s in range(80)
    } & least


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_token": 8}, "no setting called 'max_new_token'; did you mean max_new_tokens"),
    ({"profil": None}, "no setting called 'profil'; did you mean profile"),
    ({"generation_config": {"max_new_tokens": 4}}, "generation_config is a dict"),
    (
        {"generation_config": GenerationConfig(max_new_token=4)},
        "no entry of a generation config called 'max_new_token'",
    ),
    (
        {"generation_config": GenerationConfig(num_beams=4)},
        "num_beams is 4, which this decoder does not carry out",
    ),
    ({"stopping_criteria": lambda ids, scores: True}, "stopping_criteria is"),
    ({"stopping_criteria": [3]}, r"stopping_criteria is \[3\]"),
    ({"stopping_criteria": [MaxLengthCriteria(9)]}, "MaxLengthCriteria.*pass max_length instead"),
    ({"stopping_criteria": [EosTokenCriteria(9)]}, "EosTokenCriteria.*pass eos_token_id instead"),
    ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "attention_mask hides a token after one"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "attention_mask hides a token after one"),
    ({"attention_mask": torch.zeros(1, 5)}, "attention_mask hides every token"),
    (
        {"attention_mask": torch.ones(1, 4)},
        r"attention_mask has shape \(1, 4\) and the prompt \(1, 5\)",
    ),
    ({"attention_mask": torch.full((1, 5), -1e9)}, "attention_mask is .*it holds ones, and zeros"),
    ({"attention_mask": "ones"}, "attention_mask is 'ones'"),
    ({"pad_token_id": int(some_tokens(5)[0, 2])}, "hides tokens where there is no attention_mask"),
    ({"token_type_ids": torch.ones(1, 5)}, "token_type_ids is"),
    ({"logits_to_keep": 1}, "logits_to_keep is 1, which this decoder does not carry out"),
    ({"inputs": some_tokens(5)}, "inputs and input_ids are both given"),
    ({"do_sample": "yes"}, "do_sample is 'yes'; it is True or False"),
    ({"return_dict_in_generate": 1}, "return_dict_in_generate is 1"),
    ({"temperature": "1"}, "temperature is '1'; it is a number"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_p": "a"}, "top_p is 'a'"),
    ({"top_k": "3"}, "top_k is '3'"),
    ({"top_k": 1.5}, "top_k is 1.5; it is a whole number"),
    (
        {"temperature": 0.0, "do_sample": True},
        "temperature is 0.0 and do_sample is True; for greedy decoding pass do_sample=False",
    ),
    ({"top_p": 1.5, "do_sample": True}, "top_p is 1.5"),
    ({"top_k": -1, "do_sample": True}, "top_k is -1"),
    ({"min_p": 1.1, "do_sample": True}, "transformers refuses these settings: .*min_p"),
    ({"repetition_penalty": "x"}, "transformers refuses these settings"),
    ({"bad_words_ids": "x"}, "transformers refuses these settings"),
    ({"logits_processor": [3]}, r"logits_processor is \[3\]"),
    ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn is 3"),
    ({"num_return_sequences": 2}, "num_return_sequences is 2 and do_sample is not set"),
    ({"num_return_sequences": 0}, "at least 1"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ({"eos_token_id": [True]}, r"eos_token_id is \[True\]"),
    ({"eos_token_id": torch.tensor([1.0])}, "eos_token_id is tensor"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": "8"}, "max_new_tokens is '8'"),
    ({"max_length": 2.5}, "max_length is 2.5"),
    ({"max_length": 5}, "the prompt has 5 tokens and max_length is 5, the prompt included"),
    (
        {"max_new_tokens": 92},
        "92 tokens more were asked for, .* room for 91 .*pass max_new_tokens=91",
    ),
    ({"max_time": "1"}, "max_time is '1'"),
    ({"seed": "x"}, "seed is 'x'"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"streamer": print}, "streamer is"),
    ({"stop_strings": [3], "tokenizer": byte_tokenizer()}, r"stop_strings is \[3\]"),
    ({"stop_strings": [""], "tokenizer": byte_tokenizer()}, "a stop string is empty"),
    ({"stop_strings": "a"}, "stop_strings need the model's tokenizer"),
    ({"stop_strings": "a", "tokenizer": "demo"}, "tokenizer is 'demo'"),
    ({"stop_strings": ["Q"], "tokenizer": byte_tokenizer()}, "this tokenizer cannot write it"),
]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    SENSELESS,
    ids=[f"{i}-{','.join(a)}" for i, (a, _) in enumerate(SENSELESS)],
)
def test_what_makes_no_sense_or_is_not_carried_out_is_refused_in_one_sentence(
    asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DecodeError, match=sentence) as refusal:
        ss.generate(hf_model("llama"), some_tokens(5), MASK, **asked)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (
            byte_tokenizer()("abc", return_tensors="pt"),
            r"is a BatchEncoding, not token ids: unpack it, generate\(model, \*\*inputs\)",
        ),
        ({"input_ids": [1, 2]}, r"the prompt is a dict.*\*\*inputs"),
        ("text", "the prompt is the text 'text'"),
        ([[1], [2, 3]], "holds 2 sequences of different lengths: pad them on the left"),
        (some_tokens(4)[None], r"has shape \(1, 1, 4\)"),
        (some_tokens(4).double(), "a tensor of torch.float64"),
        ([1, "a"], "whole numbers"),
        ([], "the prompt is empty"),
        (None, "no bos_token_id to start from"),
        (7, "the prompt is 7"),
        ([1, 99], r"token id 99 is outside 0\.\.60"),
        (some_tokens(96), "has 96 tokens and llama was made for 96"),
    ],
    ids=lambda value: f"{value!s:.30}",
)
def test_a_senseless_prompt_is_refused(prompt: Any, sentence: str) -> None:
    with pytest.raises(DecodeError, match=sentence):
        ss.generate(hf_model("llama"), prompt, MASK, max_new_tokens=4)


def test_token_types_that_the_model_would_embed_are_refused() -> None:
    with pytest.raises(DecodeError, match="token_type_ids"):
        ss.generate(
            hf_model("gpt2"), some_tokens(5), token_type_ids=torch.zeros(1, 5, dtype=torch.long)
        )


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        ("mine.yaml", "skipsearch.load_profile"),
        (GenerationConfig(), "a GenerationConfig: pass it as generation_config="),
    ],
    ids=["path", "config"],
)
def test_a_profile_that_is_none_is_refused(profile: Any, sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence):
        ss.generate(hf_model("llama"), some_tokens(5), profile)


def test_a_model_that_is_none_of_hugging_faces_is_refused() -> None:
    for model, sentence in (
        (ss.adapt(hf_model("llama")), "is a HFAdapter of skipsearch: use skipsearch.Decoder"),
        ("demo", "a str is not a Hugging Face model"),
    ):
        with pytest.raises(ModelError, match=sentence):
            ss.generate(model, some_tokens(5))


def test_a_setting_of_the_models_config_is_refused_like_a_keyword_which_overrides_it() -> None:
    model = new_hf_model("llama")
    model.generation_config.repetition_penalty = 1.2
    model.generation_config.num_beams = 3
    with pytest.raises(DecodeError, match=r"num_beams is 3"):
        ss.generate(model, some_tokens(5))
    for asked in ({}, {"repetition_penalty": 1.0}):
        ours, theirs = both(model, some_tokens(5), num_beams=1, **asked)
        assert ours.tolist() == theirs.tolist()


def test_entries_of_the_models_own_config_that_transformers_does_not_read_are_carried_along() -> (
    None
):
    model = new_hf_model("llama")
    model.generation_config.chat_format = "chatml"
    ours, theirs = both(
        model, some_tokens(5), generation_config=copy.deepcopy(model.generation_config)
    )
    assert ours.tolist() == theirs.tolist()
