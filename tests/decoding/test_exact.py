"""`exact`: greedy text is equal to the bit with any profile and without one.

The tests use a dtype whose rounding would show a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.marks import slow, thorough
from helpers.tiny import LAYERS, FullModel, tiny_llama
from transformers import AutoModelForCausalLM

import skipsearch as ss
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import EXACT_ROWS, forward_exact, load_model, no_grad
from skipsearch.errors import DecodeError
from skipsearch.integrations import decoder_cache
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.models.loading.hub import DEMO_FOLDER

from .checks import MASKS, PROMPTS, Drafting, assert_partly_accepted
from .round_counts import counted

TEXT = "def parse_arguments(argv=None):\n"
DEMO_MASK = SkipMask(20, attn=(2, 4, 5, 7, 9, 11, 13), mlp=(3, 6, 8, 10, 12))
THIN_MASK = SkipMask(
    20, attn=range(1, 19), mlp=range(3, 17)
)  # sometimes wrong, also one token ahead


@cache
def demo(engine: str, dtype: str = "bfloat16") -> ModelAdapter:
    return load_model("demo", device="cpu", dtype=dtype, engine=engine)


@cache
def plain_text(engine: str) -> tuple[list[int], list[int]]:
    """Return (prompt, tokens after it without drafting). The text has 475 to 525 tokens."""
    model = demo(engine)
    prompt = (list(model.tokenizer(TEXT).input_ids) * 100)[:475]
    return prompt, Decoder(model, exact=True).generate(prompt, 50, ignore_eos=True).tokens


@pytest.mark.parametrize(
    ("engine", "draft_length"),
    [
        pytest.param(
            engine,
            length,
            marks=[
                pytest.mark.xdist_group(f"exact {engine}"),
                *(
                    []
                    if (engine, length) == ("lean", 8)
                    else [
                        pytest.mark.thorough
                        if engine == "lean" or length == 8
                        else pytest.mark.slow
                    ]
                ),
            ],
        )
        for engine in ("lean", "hf")
        for length in (1, 5, 7, 8, 12)
    ],
)
def test_in_bfloat16_drafting_changes_no_token_across_every_block_border(
    engine: str, draft_length: int
) -> None:
    """Attention reads 512 keys, then 1,024; drafts of 8 and more need a second pass."""
    prompt, plain = plain_text(engine)
    mask = DEMO_MASK if draft_length > 1 else THIN_MASK
    decoder = Decoder(
        demo(engine), mask, draft_length=draft_length, exit_policy=make_exit("fixed"), exact=True
    )
    drafted = decoder.generate(prompt, 50, ignore_eos=True)
    assert drafted.tokens == plain
    assert_partly_accepted(drafted.stats)


@no_grad
def logits_of(model: ModelAdapter, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Return logits [T, V] of the same text, in passes of these sizes."""
    cache, planner = model.new_cache(1, 1024), Planner(1024, model.spec.device)
    parts, at = [], 0
    for size in cuts:
        parts.append(
            forward_exact(model, torch.tensor([tokens[at : at + size]]), cache, planner, at)[0]
        )
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("engine", [*thorough("lean"), *slow("hf")])
def test_a_row_has_the_same_bits_wherever_it_stands_in_a_pass(engine: str, dtype: str) -> None:
    """Blocks of attention kernels of several CPUs end between tokens 240 and 324 and from 490 on.

    In float32, rounding does not hide another order of sums.
    """
    model = demo(engine, dtype)
    tokens = [(i * 37 + 11) % 4000 + 4 for i in range(530)]

    def cut(first: list[int], second: list[int]) -> list[int]:
        assert (sum(first), sum(second)) == (84, 40)
        return [240, *first, 166, *second]

    one_by_one = logits_of(model, tokens, cut([1] * 84, [1] * 40))
    for cuts in (
        [len(tokens)],
        cut([3] * 28, [5] * 8),
        cut([EXACT_ROWS, 1, 2, 9] * 4 + [4], [EXACT_ROWS, 2] * 4),
    ):
        assert torch.equal(logits_of(model, tokens, cuts), one_by_one), cuts


class Unsteady:
    """An engine whose rows have other bits in other passes, in the last digits before the head."""

    def __init__(self, model: ModelAdapter, flaw: Callable[[torch.Tensor, PassPlan], torch.Tensor]):
        self.model, self.flaw, self.passes_run = model, flaw, 0
        self.spec, self.tokenizer, self.pass_runner = model.spec, model.tokenizer, None
        self.new_cache, self.embed, self.head = model.new_cache, model.embed, model.head

    def block(
        self,
        i: int,
        h: torch.Tensor,
        cache: KVCache,
        plan: PassPlan,
        *,
        attn: bool = True,
        mlp: bool = True,
    ) -> torch.Tensor:
        h = self.model.block(i, h, cache, plan, attn=attn, mlp=mlp)
        self.passes_run += i == 0
        return self.flaw(h, plan) if i == self.spec.n_layers - 1 else h


def by_place(h: torch.Tensor, plan: PassPlan) -> torch.Tensor:
    return nudged(h, (torch.arange(h.shape[1]) == 4)[:, None])


def by_companions(h: torch.Tensor, plan: PassPlan) -> torch.Tensor:
    return nudged(h, h.sum(dim=1, keepdim=True).tanh())


def by_keys(h: torch.Tensor, plan: PassPlan) -> torch.Tensor:
    return nudged(h, torch.tensor(plan.n_keys > 512))


def nudged(h: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
    """Return a vector changed in another direction than its own, which a norm would undo."""
    return h + 1e-5 * amount * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype)


@pytest.mark.parametrize("flaw", [by_place, by_companions, by_keys])
def test_exact_is_refused_where_a_row_has_other_bits_in_another_pass(
    flaw: Callable[[torch.Tensor, PassPlan], torch.Tensor],
) -> None:
    model = Unsteady(adapt(tiny_llama(context=1024)), flaw)
    with pytest.raises(DecodeError, match=r"exact decoding is not possible.*leave exact out"):
        Decoder(model, exact=True)
    Decoder(model)


def test_exact_is_tried_once_for_a_model_and_a_number_of_threads() -> None:
    model = Unsteady(adapt(tiny_llama()), lambda h, plan: h)
    threads = torch.get_num_threads()
    try:
        for n, fresh in ((1, True), (1, False), (2, True), (1, False)):
            torch.set_num_threads(n)
            before = model.passes_run
            Decoder(model, exact=True)
            assert (model.passes_run > before) == fresh
    finally:
        torch.set_num_threads(threads)


def test_in_wide_floats_exact_decoding_is_the_full_models_own() -> None:
    hf = tiny_llama()
    model, full = adapt(hf), FullModel(hf)
    for drafting in (Drafting(MASKS[0], 4), Drafting(MASKS[1], 12)):
        decoder = Decoder(
            model,
            drafting.mask,
            draft_length=drafting.draft_length,
            exit_policy=make_exit("fixed"),
            exact=True,
        )
        for prompt in PROMPTS:
            assert decoder.generate(prompt, 20).tokens == full.greedy(prompt, 20)


@pytest.mark.thorough
def test_generate_and_attach_take_it_too() -> None:
    """In bfloat16, the drafted text of this prompt differs without it on the tested CPUs."""
    hf: Any = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.bfloat16).eval()
    ids = torch.tensor([list(demo("lean").tokenizer(TEXT).input_ids)])
    asked: dict[str, Any] = {"max_new_tokens": 90, "eos_token_id": None}
    plain = ss.generate(hf, ids, exact=True, **asked).tolist()
    with counted("accepted") as accepted, counted("drafted") as drafted:
        assert ss.generate(hf, ids, DEMO_MASK, exact=True, **asked).tolist() == plain
        ss.attach(hf, DEMO_MASK, exact=True)
        assert hf.generate(ids, **asked).tolist() == plain
        assert 0 < sum(accepted) < sum(drafted)
    assert all(kept.decoder.loop.exact for kept in decoder_cache._CACHE[hf])


def test_a_request_may_run_up_to_the_last_token_of_the_context() -> None:
    """There, rows that only pad a pass have positions after the context."""
    hf = tiny_llama(context=30)
    model, full = adapt(hf), FullModel(hf)
    decoder = Decoder(
        model,
        SkipMask(LAYERS, (1,), (2,)),
        draft_length=6,
        exit_policy=make_exit("fixed"),
        exact=True,
    )
    result = decoder.generate(PROMPTS[2], 100)
    assert len(result.tokens) == 30 - len(PROMPTS[2])
    assert result.tokens == full.greedy(PROMPTS[2], len(result.tokens))
