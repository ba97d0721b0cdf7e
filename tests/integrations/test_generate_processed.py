"""`ss.generate` with whatever stands between logits and tokens: penalties, bans, constraints, a
caller's own processors; and in batches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from decoding.processed_checks import PROMPT, RECIPE, Grammar, check_steering, check_steering_ends
from decoding.sampling_checks import FALSE_ALARM, surprise
from helpers.byte_tokenizer import byte_tokenizer
from helpers.marks import thorough
from helpers.properties import with_examples
from helpers.table_model import TableModel
from helpers.tiny import LAYERS, FullModel, tiny_llama, tiny_model_and_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny import VOCAB, hf_model, new_hf_model, some_tokens
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig

import skipsearch as ss
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import DecodeError, UnsupportedRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
    pytest.mark.filterwarnings("ignore:Unfeasible length"),
    pytest.mark.filterwarnings("ignore:Both `min_new_tokens`"),
]
FAMILIES = ["llama", "gpt2", "mistral-window", "falcon-rw", "opt", "qwen3"]
DRAFTERS = Recipe(
    (
        Lookup(min_match=1, draft_length=4),
        Skip.from_mask(ss.SkipMask.from_layers(3, (1,)), 3, make_exit("fixed")),
    )
)


def even_after(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of a caller's own: behind an odd token no even one."""
    banned = torch.arange(scores.shape[1]) % 2 == 0
    return scores.masked_fill(banned[None] & (ids[:, -1:] % 2 == 1), -torch.inf)


token, few = (
    st.integers(0, VOCAB - 1),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5, unique=True),
)
processed = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3, 2.0]),
        "encoder_repetition_penalty": st.sampled_from([0.8, 1.5]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "encoder_no_repeat_ngram_size": st.integers(0, 3),
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=4),
        "min_length": st.integers(0, 25),
        "min_new_tokens": st.integers(0, 12),
        "forced_bos_token_id": token,
        "forced_eos_token_id": token,
        "remove_invalid_values": st.booleans(),
        "suppress_tokens": few,
        "begin_suppress_tokens": few,
        "sequence_bias": few.map(lambda ids: [[[i], 3.0] for i in ids]),
        "exponential_decay_length_penalty": st.just((4, 1.4)),
        "renormalize_logits": st.booleans(),
        "watermarking_config": st.just(WatermarkingConfig(bias=4.0)),
        "logits_processor": st.just(LogitsProcessorList([even_after])),
        "prefix_allowed_tokens_fn": st.just(
            lambda row, ids: list(range(int(ids[-1]) % 3, VOCAB, 3))
        ),
    },
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, Any]]:
    length, padding = draw(st.integers(1, 16)), draw(st.sampled_from([0, 0, 4]))
    asked: dict[str, Any] = {
        "max_new_tokens": draw(st.integers(1, 20)),
        "eos_token_id": draw(st.one_of(token, few)),
        **draw(processed),
    }
    if padding:
        asked |= {"attention_mask": torch.tensor([[0] * padding + [1] * length]), "pad_token_id": 0}
    return some_tokens(length + padding, seed=draw(st.integers(0, 20))), asked


def check_processed(family: str, call: tuple[torch.Tensor, dict[str, Any]], drafted: bool) -> None:
    ids, asked = call
    try:
        theirs: Any = hf_model(family).generate(ids, **asked)
    except (
        ValueError,
        RuntimeError,
    ):  # settings that contradict one another: ours refuses them or writes something
        return
    ours = ss.generate(hf_model(family), ids, DRAFTERS if drafted else None, **asked)
    assert ours.tolist() == theirs.tolist(), asked


@with_examples(25)
@given(st.sampled_from(FAMILIES), calls(), st.booleans())
def test_greedy_tokens_are_those_of_generate_whatever_processes_the_logits(
    family: str, call: Any, drafted: bool
) -> None:
    check_processed(family, call, drafted)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(st.sampled_from(FAMILIES), calls(), st.booleans())
def test_greedy_tokens_over_many_random_settings(family: str, call: Any, drafted: bool) -> None:
    """By hand: `pytest -m slow tests/integrations/test_generate_processed.py`."""
    check_processed(family, call, drafted)


def test_a_processor_reads_each_emitted_token_once_in_order_and_no_rejected_one() -> None:
    stats = check_steering()
    assert 0 < stats.accepted < stats.drafted


def test_what_processors_see_grows_with_the_text_and_not_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that names no context takes any limit; a billion ids would be 8 GB."""
    monkeypatch.setattr("skipsearch.decoding.processed.FIRST_TOKENS", 3)
    stats = check_steering()
    assert 0 < stats.accepted < stats.drafted
    lengths: list[int] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.untyped_storage().nbytes() // ids.element_size())
        return scores

    stream = Decoder(TableModel()).stream([1, 2, 3], 10**9, processors=(look,))
    assert [len(chunk.tokens) for _, chunk in zip(range(20), stream, strict=False)] == [1] * 20
    assert max(lengths) <= 2 * (3 + 20)


def test_no_processor_is_called_after_the_last_token() -> None:
    stats = check_steering_ends()
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("end", ["eos", "criterion"])
def test_nor_is_one_of_generate(end: str) -> None:
    prompt, length = some_tokens(6), 6
    tokens = ss.generate(hf_model("llama"), prompt, DRAFTERS, max_new_tokens=25, eos_token_id=None)[
        0, 6:
    ].tolist()
    asked: dict[str, Any] = (
        {"eos_token_id": tokens[length - 1], "pad_token_id": 0}
        if end == "eos"
        else {
            "eos_token_id": None,
            "stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= 6 + length])],
        }
    )
    expected = tokens[: 1 + tokens.index(tokens[length - 1])] if end == "eos" else tokens[:length]
    ours = ss.generate(
        hf_model("llama"),
        prompt,
        ss.SkipMask(3),
        max_new_tokens=25,
        logits_processor=[Grammar(len(expected))],
        **asked,
    )
    assert ours[0, 6:].tolist() == expected


def test_one_that_remembers_comes_to_the_same_tokens() -> None:
    class Alternating(LogitsProcessor):
        """Forbids the likeliest token at every second call."""

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls % 2:
                scores[:, scores.argmax()] = -torch.inf  # in place, as some do
            return scores

    ids = some_tokens(6)
    mine, theirs = Alternating(), Alternating()
    ours = ss.generate(
        hf_model("llama"),
        ids,
        DRAFTERS,
        max_new_tokens=25,
        eos_token_id=None,
        logits_processor=[mine],
    )
    expected = hf_model("llama").generate(
        ids, max_new_tokens=25, eos_token_id=None, logits_processor=LogitsProcessorList([theirs])
    )
    assert ours.tolist() == expected.tolist()
    assert mine.calls == theirs.calls == 25


@pytest.mark.parametrize(
    "asked", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "min_p": 0.05}], ids=str
)
def test_scores_and_logits_are_one_entry_a_token_and_transformers_own(
    asked: dict[str, Any],
) -> None:
    model, ids = hf_model("llama"), some_tokens(6)
    told = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": 12,
        "eos_token_id": None,
    }
    ours = ss.generate(model, ids, DRAFTERS, seed=3, **told, **asked)
    assert len(ours.scores) == len(ours.logits) == 12
    full = model(ours.sequences).logits[0].float()  # type: ignore[operator]
    torch.testing.assert_close(torch.cat(ours.logits), full[5:-1], atol=1e-5, rtol=1e-5)
    if "do_sample" not in asked:
        theirs: Any = model.generate(ids, **told, **asked)  # type: ignore[operator]
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
            torch.testing.assert_close(torch.cat(mine), torch.cat(other), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_criterion_ends_it_exactly_where_transformers_ends_and_reads_the_scores(
    stop_at: int,
) -> None:
    seen: list[list[int]] = [[], []]
    results = []
    for i, write in enumerate(
        (
            lambda **a: ss.generate(hf_model("llama"), some_tokens(6), DRAFTERS, **a),
            lambda **a: hf_model("llama").generate(some_tokens(6), **a),
        )
    ):

        def ends(ids: torch.Tensor, scores: Any, i: int = i) -> torch.Tensor:
            seen[i].append(len(scores))
            return torch.tensor([ids.shape[1] >= 6 + stop_at])

        results.append(
            write(
                max_new_tokens=20,
                eos_token_id=None,
                repetition_penalty=1.1,
                return_dict_in_generate=True,
                output_scores=True,
                stopping_criteria=[ends],
            )
        )  # type: ignore[arg-type]
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    assert results[0].sequences.shape[1] == 6 + stop_at
    assert len(results[0].scores) == len(results[1].scores) == stop_at
    assert seen[0] == seen[1]


# --- samples


def expected_distribution(
    hf: Any, prompt: list[int], length: int, asked: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """Of every continuation, with transformers' own scores at each place."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for tail, mass in found.items():
            out = hf.generate(
                torch.tensor([[*prompt, *tail]]),
                max_new_tokens=1,
                do_sample=True,
                return_dict_in_generate=True,
                output_scores=True,
                eos_token_id=None,
                **asked,
            )
            p: NDArray[np.float64] = out.scores[0][0].double().softmax(-1).numpy()
            grown |= {(*tail, t): mass * float(x) for t, x in enumerate(p) if x > 0}
        found = grown
    return found


@pytest.mark.parametrize(
    "asked",
    [
        *thorough({"min_p": 0.08}),
        {"repetition_penalty": 1.4, "temperature": 1.3, "top_k": 5},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                {"typical_p": 0.7},
                {"top_h": 0.9},
                {"epsilon_cutoff": 0.06},
                {"eta_cutoff": 0.1},
                {"no_repeat_ngram_size": 1, "top_p": 0.9},
            )
        ),
    ],
    ids=str,
)
def test_samples_are_distributed_as_transformers_own(asked: dict[str, Any]) -> None:
    hf = tiny_llama(layers=LAYERS, vocab=8, hidden=16)
    prompt, length, samples = [2, 5, 2], 2, 300
    recipe = Recipe(
        (
            Lookup(min_match=1, draft_length=2),
            Skip.from_mask(ss.SkipMask(LAYERS, (1, 3), (2,)), 2, make_exit("fixed")),
        )
    )
    asked = {"top_k": 0, **asked}
    drawn: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples):
        out = ss.generate(
            hf,
            prompt,
            recipe,
            do_sample=True,
            max_new_tokens=length,
            seed=seed,
            eos_token_id=None,
            **asked,
        )
        drawn[tuple(out[0, 3:].tolist())] += 1
    assert surprise(drawn, expected_distribution(hf, prompt, length, asked)) > FALSE_ALARM


# --- batches


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=4),
    st.integers(1, 16),
    token,
    st.booleans(),
    st.sampled_from(FAMILIES),
)
def test_rows_padded_on_the_left_get_transformers_tokens(
    lengths: list[int], new: int, eos: int, penalised: bool, family: str
) -> None:
    longest = max(lengths)
    rows = [
        torch.cat([torch.full((1, longest - n), 3), some_tokens(n, seed=n)], dim=1) for n in lengths
    ]
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    asked = {
        "attention_mask": mask,
        "max_new_tokens": new,
        "eos_token_id": eos,
        "pad_token_id": 3,
    } | ({"repetition_penalty": 1.3} if penalised else {})
    ours = ss.generate(hf_model(family), torch.cat(rows), DRAFTERS, **asked)
    assert ours.tolist() == hf_model(family).generate(torch.cat(rows), **asked).tolist()  # type: ignore[operator]


def test_several_samples_of_one_prompt_differ_and_repeat_with_their_seed() -> None:
    asked = {
        "do_sample": True,
        "num_return_sequences": 3,
        "max_new_tokens": 16,
        "eos_token_id": None,
    }
    first = ss.generate(hf_model("llama"), some_tokens(5), DRAFTERS, seed=4, **asked)
    assert first.shape == (3, 21)
    assert len({tuple(row) for row in first.tolist()}) == 3
    assert (
        first.tolist()
        == ss.generate(hf_model("llama"), some_tokens(5), DRAFTERS, seed=4, **asked).tolist()
    )
    alone = ss.generate(
        hf_model("llama"), some_tokens(5), DRAFTERS, seed=4, **asked | {"num_return_sequences": 1}
    )
    assert alone.tolist() == first[:1].tolist()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"logits_processor": [even_after]},
            "logits_processor is given, and 2 sequences are to be written",
        ),
        (
            {"stopping_criteria": [lambda ids, scores: torch.tensor([False, False])]},
            "stopping_criteria is given",
        ),
        ({"output_scores": True}, "output_scores is given"),
        ({"max_time": 5.0, "eos_token_id": None}, "without an eos_token_id"),
    ],
    ids=["processors", "criteria", "scores", "no end"],
)
def test_what_could_tell_rows_one_by_one_from_rows_side_by_side_is_refused(
    asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedRequest, match=sentence):
        ss.generate(hf_model("llama"), some_tokens(4).expand(2, -1), max_new_tokens=3, **asked)


def test_a_streamer_takes_one_sequence() -> None:
    class Streamer:
        put = end = lambda self, *_: None

    with pytest.raises(DecodeError, match="a streamer takes one"):
        ss.generate(hf_model("llama"), some_tokens(4).expand(2, -1), streamer=Streamer())


# --- processors of `Request`, fused weights


def test_a_request_takes_processors_before_its_sampling() -> None:
    model, full = tiny_model_and_reference()
    decoder = Decoder(model, RECIPE)

    def no_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1])[None] % 2 == 0, -torch.inf)

    tokens, text = decoder.generate(PROMPT, 20, processors=(no_even,)).tokens, list(PROMPT)
    for found in tokens:
        logits = full.next_logits(text)
        assert found == max(range(1, len(logits), 2), key=lambda t: logits[t])
        text.append(found)
    assert all(
        t % 2
        for t in decoder.generate(PROMPT, 30, processors=(no_even,), temperature=1.5, seed=2).tokens
    )
    with pytest.raises(DecodeError, match="give functions of"):
        decoder.generate(PROMPT, 3, processors=(3,))  # type: ignore[arg-type]


def test_a_model_may_be_taken_apart_for_fused_weights() -> None:
    hf = tiny_llama()
    expected = FullModel(hf).greedy(PROMPT, 20)
    fused = ss.adapt(hf, byte_tokenizer(), fuse=True)
    assert fused.spec.engine == "lean"
    assert Decoder(fused, RECIPE).generate(PROMPT, 20).tokens == expected
    with pytest.raises(ss.ModelError, match="the engine lean cannot drive"):
        ss.adapt(new_hf_model("gpt2"), fuse=True)
