"""Decoding with a second model as drafter emits the full model's tokens."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from helpers.draft_models import draft_model_of, draft_spec, with_spec
from helpers.marks import in_turn, thorough
from helpers.tiny import (
    VOCAB,
    FullModel,
    tiny_llama,
    tiny_model_and_reference,
    use_engine,
    with_eos,
)
from helpers.toy_constraint import constrained_by, make_rule

from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder, Request
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.drafters.draft_model.session import DraftModelSession
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.models import ModelAdapter, adapt

from .checks import PROMPTS, assert_partly_accepted
from .constraint_checks import EOS, check_constrained_greedy
from .count_checks import recorded
from .draft_model_checks import (
    KINDS,
    Names,
    check_draft_model_drafts,
    check_draft_model_law,
    check_draft_models,
    list_specs,
)
from .sampling_checks import Warp

pytestmark = pytest.mark.xdist_group("native")


@pytest.mark.parametrize(("kind", "engine"), in_turn(KINDS, ["hf", "native", "graph"]))
def test_greedy_tokens_are_the_full_models_own(kind: str, engine: str) -> None:
    check_draft_models(kind, engine)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gguf"])
def test_a_draft_is_the_draft_models_own_text(kind: str) -> None:
    check_draft_model_drafts(kind)


@pytest.mark.parametrize("warp", [Warp(1.7, top_p=0.95), *thorough(Warp())], ids=str)
def test_sampled_texts_have_the_full_models_probabilities(warp: Warp) -> None:
    check_draft_model_law(warp=warp)


def test_siblings_leave_the_distribution_unchanged() -> None:
    check_draft_model_law(Siblings(below=1.0, most=1))


def test_a_draft_vocabulary_leaves_the_distribution_unchanged() -> None:
    check_draft_model_law(vocabulary=Vocabulary(lowest=0, tokens="1 4"))


def test_tokens_that_the_full_model_lacks_leave_the_distribution_unchanged() -> None:
    check_draft_model_law(n_more=2)


def test_tokens_under_another_order_are_translated() -> None:
    model, full = tiny_model_and_reference()
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    hf = tiny_llama()
    for part in (hf.model.embed_tokens, hf.lm_head):
        part.weight.copy_(part.weight[order])
    model, reordered = with_spec(model), adapt(hf)
    model.tokenizer, reordered.tokenizer = Names(VOCAB), Names(VOCAB, order)
    spec = draft_spec(reordered)
    for prompt in PROMPTS:
        result = Decoder(model, Recipe((spec,))).generate(prompt, 16)
        assert result.tokens == full.greedy(prompt, 16)
        assert result.stats.accepted == result.stats.drafted > 0, "it is the same model"
        sampled = Decoder(model, Recipe((spec,))).generate(prompt, 16, temperature=1.0)
        assert sampled.stats.accepted == sampled.stats.drafted > 0


def test_requests_of_a_batch_get_the_full_models_own_tokens() -> None:
    with use_engine("native"):
        model, full = tiny_model_and_reference()
    draft_model, _ = draft_model_of("pruned")
    results = Decoder(model, Recipe((draft_spec(draft_model),))).generate_batch(
        [Request(prompt, 12) for prompt in PROMPTS]
    )
    assert [r.tokens for r in results] == [full.greedy(prompt, 12) for prompt in PROMPTS]
    total = results[0].stats
    for result in results[1:]:
        total += result.stats
    assert_partly_accepted(total)


@dataclass(frozen=True)
class SecondModel:
    """A drafting whose drafter is a second model."""

    spec: DraftModel

    def decoder(self, model: ModelAdapter) -> Decoder:
        return Decoder(model, Recipe((self.spec,)))


@pytest.mark.parametrize("kind", ["pruned", "recurrent", *thorough("qwen2")])
def test_under_a_constraint_the_text_is_that_of_the_masked_model(kind: str) -> None:
    draftings = [SecondModel(spec) for spec in list_specs(draft_model_of(kind)[0])]
    check_constrained_greedy(draftings, seeds=(0,))  # type: ignore[arg-type]


def test_it_continues_the_tokens_that_a_constraint_forces() -> None:
    model, _ = tiny_model_and_reference()
    model, total = with_eos(model, EOS), 0
    for seed in range(6):
        with constrained_by(make_rule(seed, VOCAB, EOS), EOS):
            stats = [
                Decoder(model, recipe).generate(PROMPTS[0], 24).stats
                for recipe in (Recipe(), Recipe((draft_spec(draft_model_of("qwen2")[0]),)))
            ]
        # The last counters are those of forced tokens.
        total += stats[1].by_drafter[-1].drafted - stats[0].by_drafter[-1].drafted
    assert total > 0


def test_an_exact_decoder_gets_the_tokens_of_plain_decoding() -> None:
    model, full = tiny_model_and_reference()
    draft_model, _ = draft_model_of("qwen2")
    decoder, total = Decoder(model, Recipe((draft_spec(draft_model),)), exact=True), DecodeStats()
    for prompt in PROMPTS:
        result = decoder.generate(prompt, 12)
        assert result.tokens == full.greedy(prompt, 12)
        total += result.stats
    assert_partly_accepted(total)


def test_a_draft_ends_at_the_context_of_the_draft_model() -> None:
    model, full = tiny_model_and_reference()
    draft_model, _ = draft_model_of("qwen2")
    short = with_spec(draft_model, context_length=14)
    _, rounds = recorded(model, full, Recipe((draft_spec(short),)), PROMPTS[:1], 40)
    assert max(len(round.history) + len(round.chain) for round in rounds) == 14


class TestReading:
    """How many tokens the draft model reads before it drafts."""

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        texts, real = list[list[int]](), DraftModelSession._own_context

        def own_context(self, ctx, cache, unread):  # type: ignore[no-untyped-def]
            texts.append(list(unread))
            return real(self, ctx, cache, unread)

        monkeypatch.setattr(DraftModelSession, "_own_context", own_context)
        return texts

    def test_accepted_tokens_of_its_own_are_not_read_again(self, read: list[list[int]]) -> None:
        model, _ = tiny_model_and_reference()
        same = adapt(tiny_llama())
        Decoder(model, Recipe((draft_spec(same),))).generate(PROMPTS[0], 20)
        assert read[0][:-1] == list(PROMPTS[0])
        assert {len(tokens) for tokens in read[1:]} == {2}, "the last of a draft, and the next"

    def test_a_later_turn_reads_the_new_tokens_alone(self, read: list[list[int]]) -> None:
        model, full = tiny_model_and_reference()
        session = Decoder(model, Recipe((draft_spec(draft_model_of("qwen2")[0]),))).new_session()
        answer = session.generate(PROMPTS[2], 20).tokens
        read.clear()
        second = [*PROMPTS[2], *answer, 5, 6, 7]
        assert session.generate(second, 10).tokens == full.greedy(second, 10)
        assert len(read[0]) <= 4 + 3 + 1

    def test_a_later_turn_in_a_batch_reads_the_new_tokens_alone(
        self, read: list[list[int]]
    ) -> None:
        model, full = tiny_model_and_reference()
        decoder = Decoder(model, Recipe((draft_spec(draft_model_of("qwen2")[0]),)))
        prefixes = [PrefixCache(), PrefixCache()]
        texts = [list(PROMPTS[0]), list(PROMPTS[2])]
        for _ in range(2):
            read.clear()
            with closing(decoder.new_batch(2)) as batch:
                rows = [
                    batch.join(Request(text, 12), prefix_cache=prefix)
                    for text, prefix in zip(texts, prefixes, strict=True)
                ]
                answers: list[list[int]] = [[], []]
                while batch.running:
                    for row in batch.run_round():
                        answers[rows.index(row)] += row.chunk_or_raise().tokens
            assert answers == [full.greedy(text, 12) for text in texts]
            texts = [[*text, *answer, 5] for text, answer in zip(texts, answers, strict=True)]
        assert max(map(len, read)) <= 4 + 2

    def test_another_request_shares_nothing(self, read: list[list[int]]) -> None:
        model, _ = tiny_model_and_reference()
        decoder = Decoder(model, Recipe((draft_spec(draft_model_of("qwen2")[0]),)))
        for _ in range(2):
            read.clear()
            decoder.generate(PROMPTS[2], 10)
            assert read[0][:-1] == list(PROMPTS[2])


def test_a_decoder_keeps_its_draft_model() -> None:
    hf, draft_model = tiny_llama(), adapt(tiny_llama())
    decoder = Decoder(adapt(hf), Recipe((draft_spec(draft_model),)))
    del draft_model
    assert decoder.generate(PROMPTS[0], 8).tokens == FullModel(hf).greedy(PROMPTS[0], 8)
