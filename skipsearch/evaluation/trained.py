"""Trained drafts as replay judges them: what a module would draft at every position of the texts, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from skipsearch.cache import Planner
from skipsearch.decoding.sampling import SamplingPicker
from skipsearch.drafters.adapted import Adapted
from skipsearch.drafters.kangaroo import Kangaroo
from skipsearch.drafters.s3d import S3D
from skipsearch.engine import forward, inference, onward
from skipsearch.errors import SearchError
from skipsearch.evaluation.replay import Replay, Replayed, accepted, most_likely
from skipsearch.evaluation.rounds import LONGEST, Rounds, lay_out
from skipsearch.exits import DraftPolicy
from skipsearch.fields import ModuleRef
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.modules.files import find, read_header
from skipsearch.modules.kangaroo import Shallow, predictions, shallow
from skipsearch.modules.s3d import Simultaneous, simultaneous
from skipsearch.modules.weights import drafting_model
from skipsearch.recipe import DrafterSpec


@dataclass(frozen=True)
class TrainedDraft:
    """A module that may draft. kind: of its drafter. mask: what a draft pass costs is what one under this mask does.

    rounds: over the texts of a replay. spec: its drafter under a draft policy. siblings: whether it may draft some. at_once: tokens that
    one pass drafts, at the price of that pass; 0 for one pass a token.
    """

    kind: str
    ref: ModuleRef
    mask: SkipMask
    rounds: Callable[[Replay], Rounds]
    spec: Callable[[DraftPolicy], DrafterSpec]
    siblings: bool = False
    at_once: int = 0

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
                            lambda policy: Kangaroo(exit_layer=exit_layer, draft_length=policy.draft_length, exit=policy.exit, module=ref))
    if card.kind == "s3d":
        draft_at_once = simultaneous(model, ref, folders)
        return TrainedDraft(card.kind, ref, mask, lambda replay: s3d_rounds(replay, draft_at_once), lambda policy: S3D(
            attn=mask.attn, mlp=mask.mlp, draft_length=policy.draft_length, module=ref), at_once=draft_at_once.most)
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
            agrees = token == following
        else:
            picker = SamplingPicker(replay.sampling, torch.Generator(logits.device))
            full = forward(replay.model, torch.tensor([fed], device=logits.device), replay.model.new_cache(1, len(fed)),
                           Planner(len(fed), logits.device).chain(0, len(fed)))[0, len(prompt):]
            q, p = (picker.probs(of).gather(1, following[:, None])[:, 0] for of in (logits, full))
            agrees, confidence = accepted(q, p), picker.probs(logits).amax(dim=-1)
        found.append(Replayed(agrees.cpu().numpy(), confidence.cpu().numpy(), replay.rooms[number], number))
    return found


@inference
def s3d_rounds(replay: Replay, draft: Simultaneous) -> Rounds:
    """Exact: a draft depends on the committed text and its own rows alone. Raises: SearchError for sampled texts."""
    if not replay.sampling.greedy:
        raise SearchError("s3d is replayed on greedy text and this task samples: race it, or tune without s3d modules")
    right, room, left, lengths, numbers = list[int](), list[int](), list[int](), list[int](), list[int]()
    for number, (prompt, text) in enumerate(zip(replay.prompts, replay.tokens, strict=True)):
        count = len(text) - 1
        if count < 1:
            continue
        drafted = _at_once(replay.model, draft, prompt, text)
        for at in range(count):
            following = text[at + 1:]
            right.append(next((n for n, (a, b) in enumerate(zip(drafted[at], following, strict=False)) if a != b),
                              min(draft.most, len(following))))
        room += [replay.rooms[number] - 1 - at for at in range(count)]
        left += [count - at for at in range(count)]
        lengths.append(count)
        numbers.append(number)
    ends = np.cumsum(lengths)
    return Rounds(np.array(right), np.zeros(len(right), dtype=int), np.ones((len(right), LONGEST)), np.array(room), np.array(left),
                  ends - lengths, np.array(lengths), prompts=tuple(numbers))


def _at_once(model: ModelAdapter, draft: Simultaneous, prompt: Sequence[int], text: Sequence[int]) -> list[list[int]]:
    """What one pass drafts from each token of a text but the last, all of these passes as one."""
    device, rows = model.spec.device, draft.most
    whole, anchors = [*prompt, *text], len(text) - 1
    planner = Planner(len(whole) + anchors * rows, device)
    cache = model.new_cache(1, planner.capacity)
    forward(model, torch.tensor([whole], device=device), cache, planner.chain(0, len(whole)), last_only=True)
    group = torch.arange(anchors, device=device).repeat_interleave(rows)
    stands = len(prompt) + group[None]
    places = stands + torch.arange(rows, device=device).repeat(anchors)
    if model.spec.context is not None:   # of drafts that nobody has room for
        places = places.clamp(max=model.spec.context - 1)
    plan = planner.anchored(len(whole), places, stands, group)
    known = model.embed(torch.tensor([text[:-1]], device=device), stands[:, ::rows])[0]
    h = torch.cat([known[:, None], draft.unknown.to(known).expand(anchors, -1, -1)], dim=1).flatten(0, 1)[None]
    states = onward(draft.model, h, cache, plan, draft.mask)
    found: list[list[int]] = draft.model.head(states)[0].argmax(dim=-1).view(anchors, rows).tolist()
    return found
