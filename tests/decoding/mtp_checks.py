"""Checks of the drafts of a draft head against the definition.

Full model, head and layer run over the whole text again for every token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers.modules import module_folder, small_mtp
from helpers.tiny import FullModel, tiny_model_and_reference
from torch import Tensor

from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.trained.module_weights import load_module

from .checks import PROMPTS
from .count_checks import recorded

UNSURE = 0.5
TOKENS = 20
LOOKUP = Lookup(min_match=1, draft_length=3)


def by_definition(full: FullModel, spec: Mtp, text: list[int], drafted: list[int]) -> Tensor:
    """Return the draft's logits [V] after a text and drafted tokens, with HF's modules alone."""
    llama, tensors = full.hf.model, load_module(module_folder() / spec.module.file)[1]
    h = llama.embed_tokens(torch.tensor([text]))
    place = torch.arange(len(text))[None]
    around = {"position_embeddings": llama.rotary_emb(h, place), "attention_mask": None}
    for layer in llama.layers:
        h = layer(h, **around)
        h = h[0] if isinstance(h, tuple) else h
    template = llama.layers[-1]

    def called(module: torch.nn.Module, part: str, *inputs: Tensor, **options: object) -> Tensor:
        own = {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        found = torch.func.functional_call(module, own, inputs, options)
        return found[0] if isinstance(found, tuple) else found

    tokens, states = [*text, *drafted], h[:, : len(text) - 1]
    while True:
        rows = states.shape[1]
        embedded = llama.embed_tokens(torch.tensor([tokens[1 : rows + 1]]))
        width = embedded.shape[-1:]
        both = torch.cat(
            [
                F.rms_norm(embedded, width, tensors["norm_e.weight"], 1e-6),
                F.rms_norm(states, width, tensors["norm_h.weight"], 1e-6),
            ],
            dim=-1,
        )
        y = both @ tensors["proj.weight"].T
        rotary = llama.rotary_emb(y, torch.arange(rows)[None])
        normed = called(template.input_layernorm, "layer.attn.norm.", y)
        y = y + called(
            template.self_attn,
            "layer.attn.run.",
            hidden_states=normed,
            position_embeddings=rotary,
            attention_mask=None,
        )
        y = y + called(
            template.mlp,
            "layer.mlp.run.",
            called(template.post_attention_layernorm, "layer.mlp.norm.", y),
        )
        if rows == len(tokens) - 1:
            return full.hf.lm_head(called(llama.norm, "norm.", y))[0, -1]
        states = torch.cat([states, y[:, -1:]], dim=1)


@torch.no_grad()
def check_mtp_drafts(siblings: Siblings | None = None, in_session: bool = False) -> DecodeStats:
    """Check that every draft is that of the definition, alone and after lookup.

    A draft ends at the first unsure token. in_session: the prompts are turns of a chat.
    """
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    prompts = _list_turns(full) if in_session else PROMPTS[:3]
    spec = small_mtp(0.1, 4, UNSURE).model_copy(update={"siblings": siblings})
    for recipe in (Recipe((spec,)), Recipe((LOOKUP, spec))):
        stats, rounds = recorded(
            model, full, recipe, prompts, TOKENS, [module_folder()], in_session=in_session
        )
        total += stats
        for found in rounds:
            expected, others = list[int](), list[int]()
            while len(expected) < found.most:
                logits = by_definition(full, spec, found.history, expected)
                first, *next_best = logits.topk(1 + (siblings.most if siblings else 0)).indices
                expected.append(int(first))
                confidence = float(logits.softmax(-1).max())
                if siblings and confidence < siblings.below:
                    others += map(int, next_best)
                if confidence < UNSURE:
                    break
            assert (found.chain, found.others) == (expected, others), recipe.shape
    assert 0 < total.accepted < total.drafted
    assert (total.cached_tokens > 0) == in_session
    return total


def check_mtp_siblings() -> DecodeStats:
    """Check the same with siblings of unsure tokens."""
    return check_mtp_drafts(Siblings(below=0.9, most=3))


def check_mtp_turns() -> DecodeStats:
    """Check that later turns of a chat are drafted as if no K/V were reused."""
    return check_mtp_drafts(in_session=True)


def _list_turns(full: FullModel) -> list[list[int]]:
    turns, text = list[list[int]](), list[int]()
    for prompt in PROMPTS[:3]:
        turns.append([*text, *prompt])
        text = [*turns[-1], *full.greedy(turns[-1], TOKENS)]
    return turns
