"""A long prompt may be read part by part: others run in between, and no token changes."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_model_and_reference

from skipsearch.decoding import Generation, Request
from skipsearch.decoding.prefix_cache import PrefixCache

from .checks import DRAFTINGS, PROMPTS

PROMPT = [*PROMPTS[0], *PROMPTS[1], *PROMPTS[2]]


@pytest.mark.parametrize("drafting", DRAFTINGS, ids=str)
@pytest.mark.parametrize("n_rows", [1, 3, len(PROMPT) - 1, len(PROMPT)])
def test_a_prompt_in_parts_gets_the_tokens_of_one_in_a_pass(drafting: object, n_rows: int) -> None:
    model, full = tiny_model_and_reference()
    decoder = drafting.decoder(model)  # type: ignore[attr-defined]
    chunks = list(decoder.stream(Request(PROMPT, 12), prompt_rows=n_rows))
    found = Generation.from_chunks(chunks)
    assert found.tokens == full.greedy(PROMPT, 12)
    assert found.stats.cached_tokens == 0
    parts = [chunk for chunk in chunks if not chunk.tokens]
    assert len(parts) == (len(PROMPT) - 1) // n_rows or not decoder.loop._can_read_parts()


def test_a_request_that_leaves_between_parts_keeps_what_was_read() -> None:
    model, full = tiny_model_and_reference()
    decoder, cache = DRAFTINGS[0].decoder(model), PrefixCache()
    stream = decoder.stream(Request(PROMPT, 12), prefix_cache=cache, prompt_rows=4)
    assert next(stream).tokens == []
    stream.close()  # type: ignore[attr-defined]
    assert cache.tokens == PROMPT[:4]
    found = Generation.from_chunks(decoder.stream(Request(PROMPT, 12), prefix_cache=cache))
    assert (found.tokens, found.stats.cached_tokens) == (full.greedy(PROMPT, 12), 4)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("drafting", DRAFTINGS, ids=str)
def test_prompts_in_parts_share_a_batch(drafting: object) -> None:
    """Requests of one tenant share the part of a prompt that was read so far."""
    model, full = tiny_model_and_reference()
    batch = drafting.decoder(model).new_batch(3)  # type: ignore[attr-defined]
    prompts = [PROMPT, [*PROMPT[:-2], 1, 2], PROMPTS[1]]
    running, tokens = {}, [[] for _ in prompts]  # type: ignore[var-annotated]
    for i, prompt in enumerate(prompts):
        request = Request(prompt, 12, ignore_eos=True)
        running[batch.join(request, tenant="one", prompt_rows=3)] = i
        for each in batch.run_round():
            tokens[running[each]] += each.chunk_or_raise().tokens
    assert tokens[0] == [] or not batch.loop._can_read_parts()
    while batch.running:
        for each in batch.run_round():
            tokens[running[each]] += each.chunk_or_raise().tokens
    assert tokens == [full.greedy(prompt, 12) for prompt in prompts]
