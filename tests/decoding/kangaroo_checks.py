"""What kangaroo's drafts are, by the definition: first layers, adapter and head over the whole text, computed anew for every token."""

from __future__ import annotations

from itertools import zip_longest

import torch
from helpers.drafting import wrapped
from helpers.modules import folder, small_kangaroo
from helpers.tiny import FullModel, small_world
from torch import Tensor

from skipsearch.decoding import Decoder
from skipsearch.drafters.kangaroo import Kangaroo
from skipsearch.drafters.lookup import Lookup
from skipsearch.modules.weights import load_tensors
from skipsearch.recipe import Recipe
from skipsearch.stats import DecodeStats

from .checks import PROMPTS
from .count_checks import Recorder

UNSURE = 0.6
LOOKUP = Lookup(min_match=1, draft_length=3)


def by_definition(full: FullModel, spec: Kangaroo, text: list[int]) -> Tensor:
    """[V]: logits of the draft behind a text, with nothing but Hugging Face's modules."""
    llama, tensors = full.hf.model, load_tensors(folder() / spec.module.file)[1]
    ids, place = torch.tensor([text]), torch.arange(len(text))[None]
    h = llama.embed_tokens(ids)
    around = {"position_embeddings": llama.rotary_emb(h, place), "attention_mask": None}
    for layer in llama.layers[:spec.exit_layer]:
        h = layer(h, **around)
        h = h[0] if isinstance(h, tuple) else h
    template = llama.layers[spec.exit_layer]

    def called(module: torch.nn.Module, part: str, *inputs: Tensor, **options: object) -> Tensor:
        own = {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        found = torch.func.functional_call(module, own, inputs, options)
        return found[0] if isinstance(found, tuple) else found

    normed = called(template.input_layernorm, "adapter.attn.norm.", h)
    h = h + called(template.self_attn, "adapter.attn.run.", hidden_states=normed, **around)
    if any(name.startswith("adapter.mlp") for name in tensors):
        h = h + called(template.mlp, "adapter.mlp.run.", called(template.post_attention_layernorm, "adapter.mlp.norm.", h))
    return full.hf.lm_head(called(llama.norm, "norm.", h))[0, -1]


@torch.no_grad()
def check_kangaroo_drafts(forms: tuple[str, ...] = ("attention", "layer")) -> DecodeStats:
    """Every round's draft is what the definition gives, alone and behind lookup, and ends at the first token that it is unsure of."""
    model, full = small_world()
    total = DecodeStats()
    for form in forms:
        spec = small_kangaroo(form, 0.1, 5, UNSURE)
        for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec))):
            recorders: list[Recorder] = []

            def recording(drafter, recorders=recorders):  # type: ignore[no-untyped-def]
                recorders.append(Recorder(drafter))
                return recorders[-1]

            decoder = wrapped(Decoder(model, recipe, modules=[folder()]), recording)
            for prompt in PROMPTS[:3]:
                found = decoder.generate(prompt, 20)
                assert found.tokens == full.greedy(prompt, 20)
                total += found.stats
            for history, draft, most in zip(recorders[-1].histories, recorders[-1].drafts, recorders[-1].limits, strict=True):
                expected: list[int] = []
                while len(expected) < most:
                    logits = by_definition(full, spec, [*history, *expected])
                    expected.append(int(logits.argmax()))
                    if float(logits.softmax(-1).max()) < UNSURE:
                        break
                assert draft == expected, (form, recipe.shape)
    assert 0 < total.accepted < total.drafted
    return total


def check_kangaroo_side_by_side() -> None:
    """Requests that interleave keep their adapters' K/V apart."""
    model, full = small_world()
    decoder = Decoder(model, Recipe((LOOKUP, small_kangaroo("attention", 0.1, 4))), modules=[folder()])
    read: list[list[int]] = [[] for _ in PROMPTS]
    for chunks in zip_longest(*(decoder.stream(prompt, 16) for prompt in PROMPTS)):
        for tokens, chunk in zip(read, chunks, strict=True):
            tokens.extend(chunk.tokens if chunk else ())
    assert read == [full.greedy(prompt, 16) for prompt in PROMPTS]
