"""Checks of every draft from a module.

Distributions are enumerated, and only the full model may write committed K/V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from helpers.drafting import wrap_drafters
from helpers.modules import (
    module_folder,
    noisy_copies,
    noisy_low_rank_changes,
    save_adapted,
    save_kangaroo,
    save_mtp,
    save_s3d,
    small_kangaroo,
    small_module,
    small_mtp,
    small_s3d,
)
from helpers.tiny import model_and_reference, tiny_llama, tiny_model_and_reference, use_engine

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import DrafterSpec, Recipe, Siblings
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.kangaroo.session import KangarooSession
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.s3d.spec import DraftTree
from skipsearch.engine import forward
from skipsearch.models import ModelAdapter
from skipsearch.models.kv_cache import KVCache, Planner

from .checks import PROMPTS
from .enumeration_checks import Law, check_law
from .sampling_checks import Warp

FEW = 3  # tokens of the vocabulary whose texts are enumerated
PROMPT = (2, 0, 2, 0)  # of which lookup copies
SMALL = partial(tiny_llama, 3, vocab=FEW, hidden=16, layers=3)
BRANCHING = DraftTree(parents=(0, 1, 0), ranks=(0, 0, 1))
UNKNOWN_1 = Vocabulary(lowest=0, tokens="0")  # token 2 is in the prompt, token 1 in no draft
ALL = Siblings(below=1.0, most=1)
OF_TWO = Warp(
    1.3, top_k=2
)  # so that drafts of two tokens fall in hundreds of ways, and not in thousands


def small_specs() -> dict[str, DrafterSpec]:
    """Return drafters of every method for the model of the enumeration, of up to two tokens."""
    model, _ = model_and_reference(SMALL)
    mask, every = SkipMask(3, (0,), (1,)), {}
    every["adapted"] = save_adapted(
        model, mask, noisy_copies(model, mask, 0.3), "few.safetensors", draft_length=2
    )
    every["adapted, low rank"] = save_adapted(
        model,
        mask,
        noisy_low_rank_changes(model, mask, 2, 0.3),
        "few-lora.safetensors",
        2,
        draft_length=2,
    )
    every["kangaroo"] = save_kangaroo(model, 1, "attention", 0.3, "few-early.safetensors", 2)
    every["kangaroo, layer"] = save_kangaroo(
        model, 1, "layer", 0.3, "few-early-layer.safetensors", 2
    )
    with use_engine("hf"):
        unmodified, _ = model_and_reference(SMALL)
        every["mtp"] = save_mtp(unmodified, "few-mtp.safetensors", 0.3, 2)
    every["s3d"] = save_s3d(
        model, SkipMask(3, (1,), (1,)), 1, "few-at-once.safetensors", 2, seed=-5
    )
    for kind in ("adapted", "kangaroo"):
        every[f"{kind}, siblings"] = every[kind].model_copy(update={"siblings": ALL})
    every["s3d, tree"] = every["s3d"].model_copy(update={"tree": BRANCHING})
    for kind in ("adapted", "kangaroo", "s3d", "s3d, tree"):
        every[f"{kind}, few tokens"] = every[kind].model_copy(update={"vocabulary": UNKNOWN_1})
    return every


BRIEF = (
    "adapted",
    "kangaroo",
    "s3d, tree",
    "s3d, tree, few tokens",
)  # that every run of the tests looks at


def check_enumerated(names: Iterable[str], warp: Warp = OF_TWO, length: int = 4) -> list[Law]:
    """Check that every text of so many tokens has the full model's probability.

    Drafters run alone and after lookup.
    """
    model, full = model_and_reference(SMALL)
    specs, found = small_specs(), list[Law]()
    for name in names:
        for recipe in (
            Recipe((specs[name],)),
            Recipe((Lookup(min_match=2, draft_length=1), specs[name])),
        ):
            found.append(
                check_law(
                    Decoder(model, recipe, module_folders=[module_folder()]),
                    full,
                    PROMPT,
                    length,
                    warp,
                )
            )
    return found


def check_every_prompt(
    names: Iterable[str] = BRIEF, longest: int = 3, length: int = 6
) -> DecodeStats:
    """Check greedy text after every possible prompt of so many tokens, alone and after lookup."""
    model, full = model_and_reference(SMALL)
    specs, total = small_specs(), DecodeStats()
    for name in names:
        for recipe in (
            Recipe((specs[name],)),
            Recipe((Lookup(min_match=1, draft_length=2), specs[name])),
        ):
            decoder = Decoder(model, recipe, module_folders=[module_folder()])
            for count in range(1, longest + 1):
                for prompt in product(range(FEW), repeat=count):
                    result = decoder.generate(prompt, length)
                    assert result.tokens == full.greedy(prompt, length), (name, prompt)
                    total += result.stats
    assert 0 < total.accepted < total.drafted
    return total


# --- what is committed


def kv(cache: KVCache, n: int) -> list[torch.Tensor]:
    return [t[:, :, :n].clone() for t in (*cache.keys, *cache.values) if t is not None]


class Compared:
    """A drafter that checks the committed K/V before and after each draft.

    Before it, they are those of a new prefill. The draft does not change a bit of them.
    """

    def __init__(self, model: ModelAdapter, inner: Any):
        self.model, self.inner, self.looked = model, inner, 0

    def new_session(self) -> ComparedSession:
        return ComparedSession(self, self.inner.new_session())


class ComparedSession:
    def __init__(self, notes: Compared, inner: Any):
        self.notes, self.inner = notes, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @torch.no_grad()
    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        model, n = self.notes.model, ctx.cache.length
        fresh, planner = model.new_cache(1, 128), Planner(128, model.spec.device)
        forward(
            model,
            torch.tensor([ctx.history[:n]], device=model.spec.device),
            fresh,
            planner.plan_chain(0, n),
        )
        for mine, theirs in zip(kv(ctx.cache, n), kv(fresh, n), strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-6), (
                "what is committed is what a fresh prefill writes"
            )
        drafting = getattr(self.inner, "session", self.inner)
        if isinstance(drafting, KangarooSession):
            self.adapters_kv(drafting, ctx.history[:n])
        before = kv(ctx.cache, n)
        draft = self.inner.draft(ctx, most)
        assert all(map(torch.equal, before, kv(ctx.cache, n))), (
            "a draft leaves what is committed alone"
        )
        self.notes.looked += 1
        return draft

    def adapters_kv(self, session: KangarooSession, history: Sequence[int]) -> None:
        """Check that the adapter's K/V of the known text are those of a new pass over it."""
        shallow, layer, known = (
            session.early_exit_draft,
            session.early_exit_draft.model.spec.n_layers,
            session.n_in_cache,
        )
        assert known <= len(history), "it knows nothing that is not committed"
        if not known:  # nothing was drafted yet
            return
        fresh, plan = (
            shallow.new_cache(128),
            Planner(128, self.notes.model.spec.device).plan_chain(0, known),
        )
        shallow.run_adapter(
            shallow.compute_features(
                torch.tensor([history[:known]], device=plan.positions.device), fresh, plan
            ),
            fresh,
            plan,
        )
        for mine, theirs in (
            (session.cache.keys, fresh.keys),
            (session.cache.values, fresh.values),
        ):
            assert torch.allclose(
                mine[layer][:, :, :known], theirs[layer][:, :, :known], rtol=0, atol=1e-6
            )  # type: ignore[index]


def check_committed(specs: Sequence[DrafterSpec]) -> DecodeStats:
    """Check that K/V of committed text are the full model's own after every round.

    A draft does not change a bit of them.
    """
    model, full = tiny_model_and_reference()
    total = DecodeStats()
    for spec in specs:
        for recipe in (Recipe((spec,)), Recipe((Lookup(min_match=1, draft_length=3), spec))):
            compared = list[Compared]()

            def around(drafter: Any, compared: list[Compared] = compared) -> Compared:
                compared.append(Compared(model, drafter))
                return compared[-1]

            decoder = wrap_drafters(
                Decoder(model, recipe, module_folders=[module_folder()]), around
            )
            for prompt in PROMPTS[:3]:
                found = decoder.generate(prompt, 18)
                assert found.tokens == full.greedy(prompt, 18)
                total += found.stats
            assert compared[-1].looked > 3
    assert 0 < total.accepted < total.drafted
    return total


def check_adapted_committed() -> DecodeStats:
    return check_committed(
        [
            small_module(0.1, 4),
            small_module(0.1, 4).model_copy(update={"siblings": Siblings(below=0.7, most=2)}),
        ]
    )


def check_kangaroo_committed() -> DecodeStats:
    return check_committed(
        [
            small_kangaroo("attention", 0.1, 4),
            small_kangaroo("layer", 0.1, 4).model_copy(
                update={"siblings": Siblings(below=0.7, most=2)}
            ),
        ]
    )


def check_s3d_committed() -> DecodeStats:
    return check_committed([small_s3d(2), small_s3d().model_copy(update={"tree": BRANCHING})])


def check_mtp_committed() -> DecodeStats:
    return check_committed(
        [
            small_mtp(0.1, 4),
            small_mtp(0.1, 4).model_copy(update={"siblings": Siblings(below=0.7, most=2)}),
        ]
    )
