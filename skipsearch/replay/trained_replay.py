"""Replay trained drafts of any kind at every position of the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.core.cost_model import Costs, ResumedVerifyCosts
from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import WEIGHTS_OF_BITS, DraftWeights, Reading, Vocabulary
from skipsearch.core.recipe import DrafterSpec
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.kangaroo.spec import Kangaroo
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft, load_early_exit, predict_text
from skipsearch.drafters.mtp.shipped import load_head_of
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.mtp.weights import DraftHead, load_draft_head
from skipsearch.drafters.s3d.spec import S3D, DraftTree
from skipsearch.drafters.s3d.weights import load_multi_token
from skipsearch.drafters.trained.module_files import find_module_file, read_module_header
from skipsearch.drafters.trained.module_weights import load_drafting_model
from skipsearch.engine import can_start_midway, forward, no_grad
from skipsearch.engine.reduced_model import can_restrict_head
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.draft_head_replay import replay_draft_head
from skipsearch.replay.parallel_draft import DraftRanks, replay_parallel_draft
from skipsearch.replay.replay import PromptReplay, Replay
from skipsearch.replay.rounds import RoundTable, rounds_from_replay

Vocabularies = Sequence[Vocabulary | None]
Readings = Sequence[Reading]


def _same_costs(costs: Costs) -> Costs:
    return costs


@dataclass(frozen=True)
class TrainedDraft:
    """A module whose drafts can be replayed, with each of several readings."""

    kind: str  # of its drafter
    ref: ModuleRef | None  # None: a head that the model ships
    mask: SkipMask  # a draft pass costs as much as with this mask
    replay_rounds: Callable[[Replay, Readings], list[RoundTable]]
    make_spec: Callable[[DraftPolicy, Reading], DrafterSpec]
    allows_siblings: bool = False
    adjust_costs: Callable[[Costs], Costs] = _same_costs  # from the costs of `mask`
    # Ranks of a parallel draft (S3D); None: the drafter makes one pass per token.
    rank_drafts: Callable[[Replay, Readings], list[DraftRanks]] | None = None
    folders: tuple[Path, ...] = ()  # of its module
    # Whether the latency table has no price for its steps, so that they are timed.
    needs_timing: bool = False
    # The vocabulary that it was trained to draft; None: any, all tokens included.
    vocabulary: Vocabulary | None = None
    weights: tuple[DraftWeights, ...] = ("stored",)  # formats that are tried

    def measure_alpha(self, replay: Replay) -> float:
        """Return the share of positions whose first draft token is the full model's."""
        [rounds] = self.replay_rounds(replay, [Reading(vocabulary=self.vocabulary)])
        return float((rounds.accepted_len > 0).mean())


def load_trained_draft(
    model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]
) -> TrainedDraft:
    """Load a module. Raises: ModuleError if it is missing, damaged, or for another model."""
    draft = _load_trained_draft(model, ref, folders)
    return replace(draft, folders=tuple(folders))


def _load_trained_draft(
    model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]
) -> TrainedDraft:
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
            lambda replay, readings: [
                rounds_from_replay(replayed)
                for replayed in replay_kangaroo(replay, early, vocabularies_of(readings))
            ],
            lambda policy, reading: Kangaroo(
                exit_layer=exit_layer,
                draft_length=policy.draft_length,
                exit=policy.exit,
                siblings=policy.siblings,
                vocabulary=reading.vocabulary,
                module=ref,
            ),
            True,
            lambda costs: (
                ResumedVerifyCosts.from_costs(costs, exit_layer)
                if can_start_midway(model)
                else costs
            ),
            needs_timing=True,
        )
    if card.kind == "s3d":
        at_once = load_multi_token(model, ref, folders)
        chain = DraftTree(parents=tuple(range(at_once.max_tokens)), ranks=(0,) * at_once.max_tokens)
        return TrainedDraft(
            card.kind,
            ref,
            mask,
            lambda replay, readings: [
                ranks.to_rounds(chain)
                for ranks in replay_parallel_draft(replay, at_once, vocabularies_of(readings))
            ],
            lambda policy, reading: S3D(
                attn=mask.attn,
                mlp=mask.mlp,
                draft_length=policy.draft_length,
                vocabulary=reading.vocabulary,
                module=ref,
            ),
            rank_drafts=lambda replay, readings: replay_parallel_draft(
                replay, at_once, vocabularies_of(readings)
            ),
        )
    if card.kind == "mtp":
        head, vocabulary = load_draft_head(model, ref, folders), card.vocabulary
        if vocabulary is not None and not can_restrict_head(head.adapter):
            vocabulary = None
        return _make_mtp_draft(head, ref, mask, vocabulary, card.bits)
    draft = load_drafting_model(model, ref, folders)
    return TrainedDraft(
        card.kind,
        ref,
        mask,
        lambda replay, readings: [
            rounds_from_replay(replayed)
            for replayed in replay.judge(mask, vocabularies_of(readings), drafting_model=draft)
        ],
        lambda policy, reading: Adapted.from_module(
            mask, policy.draft_length, policy.exit, ref, policy.siblings, reading.vocabulary
        ),
        True,
    )


def load_shipped_draft(model: ModelAdapter) -> TrainedDraft:
    """Load the head that a model ships. Raises: ModuleError if it ships none that can be loaded."""
    n = model.spec.n_layers
    # A step costs about as much as the last layer.
    return _make_mtp_draft(load_head_of(model), None, SkipMask.from_layers(n, range(n - 1)))


def _make_mtp_draft(
    head: DraftHead,
    ref: ModuleRef | None,
    mask: SkipMask,
    vocabulary: Vocabulary | None = None,
    bits: int | None = None,
) -> TrainedDraft:
    """Make the draft of a head. bits: as its card has them."""
    formats: tuple[DraftWeights, ...] = ("stored",)
    if head.runner is not None:
        formats = (WEIGHTS_OF_BITS[bits],) if bits else ("stored", "int8")
    return TrainedDraft(
        "mtp",
        ref,
        mask,
        lambda replay, readings: [
            rounds
            for weights, of_weights in groupby(readings, lambda reading: reading.weights)
            for rounds in replay_draft_head(
                replay, head.rounded(weights), vocabularies_of(of_weights)
            )
        ],
        lambda policy, reading: Mtp(
            draft_length=policy.draft_length,
            exit=policy.exit,
            siblings=policy.siblings,
            weights=reading.weights,
            vocabulary=reading.vocabulary,
            module=ref,
        ),
        True,
        needs_timing=True,
        vocabulary=vocabulary,
        weights=formats,
    )


def vocabularies_of(readings: Iterable[Reading]) -> Vocabularies:
    """Return the vocabulary of each reading."""
    return [reading.vocabulary for reading in readings]


@no_grad
def replay_kangaroo(
    replay: Replay, early_exit_draft: EarlyExitDraft, vocabularies: Vocabularies = (None,)
) -> list[list[PromptReplay]]:
    """Replay Kangaroo with each vocabulary.

    The replay is exact, because hidden states up to the exit are the full model's.
    """
    replays: list[list[PromptReplay]] = [[] for _ in vocabularies]
    for prompt_index, (prompt, text) in enumerate(
        zip(replay.prompt_ids, replay.continuations, strict=True)
    ):
        if len(text) < 2:
            continue
        input_ids = [*prompt, *text[:-1]]
        logits = predict_text(early_exit_draft, input_ids)[len(prompt) :]
        labels = torch.tensor(text[1:], device=logits.device)
        p = None if replay.sampling.is_greedy else _full_probs(replay, input_ids, labels)
        rounds = torch.arange(len(logits), device=logits.device)
        by_vocabulary = replay.mask_unknown_tokens(logits, prompt_index, rounds, vocabularies)
        for masked, of_vocabulary in zip(by_vocabulary, replays, strict=True):
            acceptance, confidence, rank = replay.judge_logits(masked, labels, p)
            of_vocabulary.append(
                PromptReplay(
                    acceptance.cpu().numpy(),
                    confidence.cpu().numpy(),
                    replay.token_budgets[prompt_index],
                    prompt_index,
                    rank.cpu().numpy() if replay.sampling.is_greedy else None,
                )
            )
    return replays


def _full_probs(replay: Replay, input_ids: Sequence[int], labels: Tensor) -> Tensor:
    """Return the full model's probability of each label, [N], at the last N tokens of a text."""
    planner = Planner(len(input_ids), labels.device)
    logits = forward(
        replay.model,
        torch.tensor([input_ids], device=labels.device),
        replay.model.new_cache(1, len(input_ids)),
        planner.plan_chain(0, len(input_ids)),
    )[0, -len(labels) :]
    sampler = replay.batches.sampler
    assert sampler is not None  # the text was sampled
    return sampler.warp_to_probs(logits).gather(1, labels[:, None])[:, 0]
