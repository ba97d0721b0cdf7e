"""Replay trained drafts of any kind at every position of the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from skipsearch.core.cost_model import Costs, ResumedVerifyCosts
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL, Reading
from skipsearch.core.recipe import DrafterSpec
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.kangaroo.spec import Kangaroo
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft, load_early_exit, predict_text
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.mtp.weights import load_draft_head
from skipsearch.drafters.s3d.spec import S3D, DraftTree
from skipsearch.drafters.s3d.weights import load_multi_token
from skipsearch.drafters.trained.module_files import find_module_file, read_module_header
from skipsearch.drafters.trained.module_weights import load_drafting_model
from skipsearch.engine import can_start_midway, forward, no_grad
from skipsearch.engine.draft_model import can_restrict_head
from skipsearch.engine.sampler import TemperatureSampler
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.draft_head_replay import replay_draft_head
from skipsearch.replay.parallel_draft import DraftRanks, replay_parallel_draft
from skipsearch.replay.replay import (
    PromptReplay,
    Replay,
    accept_probability,
    greedy_token,
    token_ranks,
)
from skipsearch.replay.rounds import RoundTable, rounds_from_replay


def _same_costs(costs: Costs) -> Costs:
    return costs


@dataclass(frozen=True)
class TrainedDraft:
    """A module whose drafts can be replayed."""

    kind: str  # of its drafter
    ref: ModuleRef
    mask: SkipMask  # a draft pass costs as much as with this mask
    replay_rounds: Callable[[Replay], RoundTable]
    make_spec: Callable[[DraftPolicy], DrafterSpec]
    allows_siblings: bool = False
    adjust_costs: Callable[[Costs], Costs] = _same_costs  # from the costs of `mask`
    # Ranks of a parallel draft (S3D); None: the drafter makes one pass per token.
    rank_drafts: Callable[[Replay], DraftRanks] | None = None
    reading: Reading = READ_ALL  # what a draft pass reads, besides what the mask skips

    def measure_alpha(self, replay: Replay) -> float:
        """Return the share of positions whose first draft token is the full model's."""
        return float((self.replay_rounds(replay).accepted_len > 0).mean())


def load_trained_draft(
    model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]
) -> TrainedDraft:
    """Load a module. Raises: ModuleError if it is missing, damaged, or for another model."""
    card = read_module_header(find_module_file(ref, folders)).card
    mask = card.mask
    if card.kind == "kangaroo":
        early = load_early_exit(model, ref, folders)
        # The adapter costs as much as the sub-layers whose form it has.
        exit_layer = early.exit_layer
        costing = mask.flip(2 * exit_layer, *([2 * exit_layer + 1] if card.form == "layer" else []))
        return TrainedDraft(
            card.kind,
            ref,
            costing,
            lambda replay: rounds_from_replay(replay_kangaroo(replay, early)),
            lambda policy: Kangaroo(
                exit_layer=exit_layer,
                draft_length=policy.draft_length,
                exit=policy.exit,
                siblings=policy.siblings,
                module=ref,
            ),
            True,
            lambda costs: (
                ResumedVerifyCosts.from_costs(costs, exit_layer)
                if can_start_midway(model)
                else costs
            ),
        )
    if card.kind == "s3d":
        at_once = load_multi_token(model, ref, folders)
        chain = DraftTree(parents=tuple(range(at_once.max_tokens)), ranks=(0,) * at_once.max_tokens)
        return TrainedDraft(
            card.kind,
            ref,
            mask,
            lambda replay: replay_parallel_draft(replay, at_once).to_rounds(chain),
            lambda policy: S3D(
                attn=mask.attn, mlp=mask.mlp, draft_length=policy.draft_length, module=ref
            ),
            rank_drafts=lambda replay: replay_parallel_draft(replay, at_once),
        )
    if card.kind == "mtp":
        head, vocabulary = load_draft_head(model, ref, folders), card.vocabulary
        if vocabulary is not None and not can_restrict_head(head.adapter):
            vocabulary = None
        return TrainedDraft(
            card.kind,
            ref,
            mask,
            lambda replay: replay_draft_head(replay, head, vocabulary),
            lambda policy: Mtp(
                draft_length=policy.draft_length,
                exit=policy.exit,
                siblings=policy.siblings,
                vocabulary=vocabulary,
                module=ref,
            ),
            True,
            reading=Reading(vocabulary=vocabulary),
        )
    draft = load_drafting_model(model, ref, folders)
    return TrainedDraft(
        card.kind,
        ref,
        mask,
        lambda replay: rounds_from_replay(replay(mask, draft_model=draft)),
        lambda policy: Adapted.from_module(
            mask, policy.draft_length, policy.exit, ref, policy.siblings
        ),
        True,
    )


@no_grad
def replay_kangaroo(replay: Replay, early_exit_draft: EarlyExitDraft) -> list[PromptReplay]:
    """Replay Kangaroo. It is exact, because hidden states up to the exit are the full model's."""
    replays = []
    for prompt_index, (prompt, text) in enumerate(
        zip(replay.prompt_ids, replay.continuations, strict=True)
    ):
        if len(text) < 2:
            continue
        input_ids = [*prompt, *text[:-1]]
        logits = predict_text(early_exit_draft, input_ids)[len(prompt) :]
        labels = torch.tensor(text[1:], device=logits.device)
        if replay.sampling.is_greedy:
            token, confidence = greedy_token(logits)
            acceptance, rank = token == labels, token_ranks(labels, logits).cpu().numpy()
        else:
            sampler = TemperatureSampler(replay.sampling, torch.Generator(logits.device))
            full = forward(
                replay.model,
                torch.tensor([input_ids], device=logits.device),
                replay.model.new_cache(1, len(input_ids)),
                Planner(len(input_ids), logits.device).plan_chain(0, len(input_ids)),
            )[0, len(prompt) :]
            q, p = (
                sampler.warp_to_probs(of).gather(1, labels[:, None])[:, 0] for of in (logits, full)
            )
            acceptance, confidence, rank = (
                accept_probability(q, p),
                sampler.warp_to_probs(logits).amax(dim=-1),
                None,
            )
        replays.append(
            PromptReplay(
                acceptance.cpu().numpy(),
                confidence.cpu().numpy(),
                replay.token_budgets[prompt_index],
                prompt_index,
                rank,
            )
        )
    return replays
