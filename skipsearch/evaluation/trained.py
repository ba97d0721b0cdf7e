"""Trained drafts as replay judges them: what a module would draft at every position of the texts, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from skipsearch.cache import Planner
from skipsearch.costs import Costs, Resumed
from skipsearch.decoding.sampling import SamplingPicker
from skipsearch.drafters.adapted import Adapted
from skipsearch.drafters.kangaroo import Kangaroo
from skipsearch.drafters.s3d import S3D, Tree
from skipsearch.engine import forward, in_parts, inference
from skipsearch.evaluation.at_once import Choices, choices
from skipsearch.evaluation.replay import Replay, Replayed, accepted, most_likely, rank_of
from skipsearch.evaluation.rounds import Rounds, lay_out
from skipsearch.exits import DraftPolicy
from skipsearch.fields import ModuleRef
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.files import find, read_header
from skipsearch.modules.kangaroo import Shallow, predictions, shallow
from skipsearch.modules.s3d import simultaneous
from skipsearch.modules.weights import drafting_model
from skipsearch.recipe import DrafterSpec


def _unchanged(costs: Costs) -> Costs:
    return costs


@dataclass(frozen=True)
class TrainedDraft:
    """A module that may draft. kind: of its drafter. mask: what a draft pass costs is what one under this mask does.

    rounds: over the texts of a replay. spec: its drafter under a draft policy. siblings: whether it may draft some. priced: what its rounds
    cost, from what passes of the model do. choices: of a draft that has all tokens from one pass, what that says; None: one pass a token.
    """

    kind: str
    ref: ModuleRef
    mask: SkipMask
    rounds: Callable[[Replay], Rounds]
    spec: Callable[[DraftPolicy], DrafterSpec]
    siblings: bool = False
    priced: Callable[[Costs], Costs] = _unchanged
    choices: Callable[[Replay], Choices] | None = None

    def alpha(self, replay: Replay) -> float:
        """At which share of the positions the first drafted token is the full model's."""
        return float((self.rounds(replay).right > 0).mean())


def trained_draft(model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]) -> TrainedDraft:
    """Raises: ModuleError for a file that is missing, damaged, or made for another model."""
    card = read_header(find(ref, folders)).card
    mask = card.mask
    if card.kind == "kangaroo":
        early = shallow(model, ref, folders)
        exit_layer = early.exit_layer   # the adapter costs what the sub-layers that it is made like cost
        costing = mask.flipped(2 * exit_layer, *([2 * exit_layer + 1] if card.form == "layer" else []))
        return TrainedDraft(card.kind, ref, costing, lambda replay: lay_out(kangaroo_replayed(replay, early)),
                            lambda policy: Kangaroo(exit_layer=exit_layer, draft_length=policy.draft_length, exit=policy.exit,
                                                    siblings=policy.siblings, module=ref), True,
                            lambda costs: Resumed.of(costs, exit_layer) if in_parts(model) else costs)
    if card.kind == "s3d":
        at_once = simultaneous(model, ref, folders)
        chain = Tree(parents=tuple(range(at_once.most)), ranks=(0,) * at_once.most)
        return TrainedDraft(card.kind, ref, mask, lambda replay: choices(replay, at_once).rounds(chain), lambda policy: S3D(
            attn=mask.attn, mlp=mask.mlp, draft_length=policy.draft_length, module=ref), choices=lambda replay: choices(replay, at_once))
    draft = drafting_model(model, ref, folders)
    return TrainedDraft(card.kind, ref, mask, lambda replay: lay_out(replay(mask, draft=draft)),
                        lambda policy: Adapted.trained(mask, policy.draft_length, policy.exit, ref, policy.siblings), True)


@inference
def kangaroo_replayed(replay: Replay, early: Shallow) -> list[Replayed]:
    """Exact, at every position: below the exit a draft's features are the full model's own."""
    found = []
    for number, (prompt, text) in enumerate(zip(replay.prompts, replay.tokens, strict=True)):
        if len(text) < 2:
            continue
        fed = [*prompt, *text[:-1]]
        logits = predictions(early, fed)[len(prompt):]
        following = torch.tensor(text[1:], device=logits.device)
        if replay.sampling.greedy:
            token, confidence = most_likely(logits)
            agrees, rank = token == following, rank_of(following, logits).cpu().numpy()
        else:
            picker = SamplingPicker(replay.sampling, torch.Generator(logits.device))
            full = forward(replay.model, torch.tensor([fed], device=logits.device), replay.model.new_cache(1, len(fed)),
                           Planner(len(fed), logits.device).chain(0, len(fed)))[0, len(prompt):]
            q, p = (picker.probs(of).gather(1, following[:, None])[:, 0] for of in (logits, full))
            agrees, confidence, rank = accepted(q, p), picker.probs(logits).amax(dim=-1), None
        found.append(Replayed(agrees.cpu().numpy(), confidence.cpu().numpy(), replay.rooms[number], number, rank))
    return found
