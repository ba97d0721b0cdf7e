"""What is trained, by kind: the weights that learn, and the rows of a text on which they do, exactly as decoding runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from skipsearch.cache import KVCache, Planner
from skipsearch.engine import inference, onward
from skipsearch.mask import SkipMask
from skipsearch.models import variants
from skipsearch.models.hf import HFAdapter
from skipsearch.modules.kangaroo import KINDS, PREFIX, Shallow
from skipsearch.modules.rows import Reading, Targets, draft_states, lesson, read, targets
from skipsearch.modules.s3d import UNKNOWN, Simultaneous
from skipsearch.modules.weights import DOWN, UP


class Pupil(Protocol):
    """parameters: what learns, by the names of a module's file. facts: what makes one training another one, for its checkpoint.

    ahead: tokens that a draft is trained to run ahead.
    """

    model: HFAdapter
    parameters: dict[str, nn.Parameter]
    facts: dict[str, Any]
    ahead: int

    def read(self, texts: Tensor, likeliest: int) -> Any:
        """What the full model makes of texts [B, T]; any number of draft passes may learn from it."""

    def rows(self, reading: Any, first: int) -> tuple[Tensor, Targets]:
        """What goes into the draft's head at every row that the texts have, [B, R, H], and what the full model says there.

        reading: of `read`. first: 0 … ahead − 1, where drafts start.
        """

    def head(self, h: Tensor) -> Tensor: ...


class AdaptedPupil:
    """Copies of the sub-layers that a mask keeps, or low-rank changes of them.

    Raises: ModelError for sub-layers that cannot be copied.
    """

    def __init__(self, model: HFAdapter, mask: SkipMask, rank: int | None = None, ahead: int = 5, seed: int = 0):
        self.model, self.mask, self.ahead = model, mask, ahead
        sublayers = variants.kept(mask)
        for i, kind in sublayers:
            variants.weights_of(model, i, kind)   # refuses what cannot be trained, before anything is copied
        self.draft = variants.with_copies(model, sublayers)
        self.parameters = dict(trainable(self.draft, sublayers, rank, seed))
        self.facts = {"kind": "adapted", "attn": mask.attn, "mlp": mask.mlp, "rank": rank, "ahead": ahead}

    @torch.no_grad()
    def go_on_from(self, tensors: Mapping[str, Tensor], sha256: str) -> None:
        """Begin with those tensors of a module that this draft has too. sha256: of its file."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        self.facts["start"] = sha256

    def read(self, texts: Tensor, likeliest: int) -> Reading:
        return read(self.model, texts, likeliest, _attending(self.mask))

    def rows(self, reading: Reading, first: int) -> tuple[Tensor, Targets]:
        given = lesson(reading, self.ahead, first)
        return draft_states(self.draft, self.mask, given), given.targets

    def head(self, h: Tensor) -> Tensor:
        return self.draft.head(h)


class KangarooPupil:
    """An adapter behind layer exit_layer − 1. Its features are the full model's own, so one pass over a text is what any round would do."""

    ahead = 1

    def __init__(self, model: HFAdapter, exit_layer: int, form: str = "attention"):
        self.model = model
        adapter = variants.with_layer(model, exit_layer)
        assert isinstance(adapter, HFAdapter)
        n, wide = model.spec.n_layers, torch.promote_types(model.spec.dtype, torch.float32)
        self.shallow = Shallow(model, adapter, exit_layer, form)
        found = trainable(adapter, [(n, kind) for kind in KINDS[form]], None, 0)
        self.parameters = {PREFIX + name.partition(".")[2]: parameter for name, parameter in found}
        for name, parameter in variants.final_norm(adapter).items():
            assert isinstance(parameter, nn.Parameter)
            parameter.data = parameter.data.to(wide)
            parameter.requires_grad_()
            self.parameters[name] = parameter
        self.facts = {"kind": "kangaroo", "exit_layer": exit_layer, "form": form}

    def rows(self, reading: tuple[Tensor, Targets], first: int) -> tuple[Tensor, Targets]:
        features, taught = reading
        batch, length, _ = features.shape
        plan = Planner(length, features.device).chain(0, length, batch)
        return self.shallow.adapted(features, KVCache(self.model.spec.n_layers + 1, batch, length), plan), taught

    def head(self, h: Tensor) -> Tensor:
        return self.shallow.head(h)

    @inference
    def read(self, texts: Tensor, likeliest: int) -> tuple[Tensor, Targets]:
        """(what goes into the exit layer, what the full model says) at every position."""
        model, seen = self.model, dict[int, Tensor]()
        plan = Planner(texts.shape[1], texts.device).chain(0, texts.shape[1], len(texts))
        cache = model.new_cache(len(texts), texts.shape[1])
        states = onward(model, model.embed(texts, plan.positions), cache, plan, tap=lambda i, h: seen.__setitem__(i, h))
        return seen[self.shallow.exit_layer], targets(model, states, likeliest)


class S3DPupil:
    """Embeddings for the rows of a draft whose token nobody knows; with a rank, low-rank changes of the kept sub-layers too.

    ahead: tokens that one pass drafts.
    """

    def __init__(self, model: HFAdapter, mask: SkipMask, ahead: int = 4, rank: int | None = None, seed: int = 0):
        self.model, self.mask, self.ahead = model, mask, ahead
        sublayers = variants.kept(mask) if rank else []
        draft = variants.with_copies(model, sublayers)
        wide = torch.promote_types(model.spec.dtype, torch.float32)
        with torch.no_grad():   # where all tokens' embeddings are on average, give or take
            probe = torch.arange(min(model.spec.vocab, 4096), device=model.spec.device)[None]
            known = model.embed(probe, torch.zeros_like(probe))[0].to(wide)
            random = torch.Generator().manual_seed(seed)
            noise = torch.randn(ahead - 1, model.spec.hidden, generator=random).to(known)
            unknown = nn.Parameter(known.mean(dim=0) + 0.5 * known.std(dim=0) * noise)
        self.simultaneous = Simultaneous(draft, mask, unknown)
        self.parameters = {UNKNOWN: unknown, **dict(trainable(draft, sublayers, rank, seed))}
        self.facts = {"kind": "s3d", "attn": mask.attn, "mlp": mask.mlp, "rank": rank, "ahead": ahead}

    def read(self, texts: Tensor, likeliest: int) -> Reading:
        return read(self.model, texts, likeliest, _attending(self.mask))

    def rows(self, reading: Reading, first: int) -> tuple[Tensor, Targets]:
        given = lesson(reading, self.ahead, first)
        h = self.model.embed(given.fed, given.plan.positions)
        groups = given.fed.shape[1] // self.ahead
        nobody = self.simultaneous.unknown.to(h).repeat(groups, 1, 1)                                 # [groups, ahead − 1, H]
        h = torch.cat([h.unflatten(1, (groups, self.ahead))[:, :, :1], nobody.expand(len(h), -1, -1, -1)], dim=2).flatten(1, 2)
        return onward(self.simultaneous.model, h, given.cache, given.plan, self.mask), given.targets

    def head(self, h: Tensor) -> Tensor:
        return self.simultaneous.model.head(h)


def _attending(mask: SkipMask) -> frozenset[int]:
    """Layers whose attention a draft runs."""
    return frozenset(range(mask.n_layers)) - frozenset(mask.attn)


def trainable(model: HFAdapter, sublayers: list[tuple[int, str]], rank: int | None, seed: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Makes copies that a variant has learn, in float32 or better; by name. rank: low-rank changes of matrices instead."""
    dtype = torch.promote_types(model.spec.dtype, torch.float32)
    random = torch.Generator().manual_seed(seed)
    for i, kind in sublayers:
        for part, module in list(variants.modules_of(model, i, kind)):
            for name, parameter in list(module.named_parameters()):
                full = f"{i}.{kind}.{part}.{name}"
                if rank is None or parameter.ndim != 2:
                    parameter.data = parameter.data.to(dtype)
                    parameter.requires_grad_()
                    yield full, parameter
                    continue
                parameter.requires_grad_(False)
                change = LowRank(parameter, rank, dtype, random)
                owner, _, leaf = name.rpartition(".")
                parametrize.register_parametrization(module.get_submodule(owner), leaf, change, unsafe=True)
                yield from ((full + DOWN, change.down), (full + UP, change.up))


class LowRank(nn.Module):
    """weight + up · down, where up begins at zero. Source: LoRA (Hu et al. 2021), with its scale in the factors."""

    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, weight: Tensor, rank: int, dtype: torch.dtype, random: torch.Generator):
        super().__init__()
        out, into = weight.shape
        down = torch.randn(rank, into, generator=random, dtype=torch.float32) * into**-0.5
        self.down = nn.Parameter(down.to(weight.device, dtype))
        self.up = nn.Parameter(torch.zeros(out, rank, dtype=dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).to(weight.dtype)


@inference
def agreement(pupil: Pupil, texts: Tensor, head_rows: int) -> float:
    """At which share of all rows of texts [N, T] the draft names the token that the full model does."""
    right = rows = 0
    for some in texts.split(16):
        states, taught = pupil.rows(pupil.read(some.long().to(pupil.model.spec.device), 1), 0)
        wanted = taught.tokens[..., 0].flatten()
        for part, tokens in zip(states.flatten(0, 1).split(head_rows), wanted.split(head_rows), strict=True):
            right += int((pupil.head(part[None])[0].argmax(dim=-1) == tokens).sum())
        rows += len(wanted)
    return right / max(1, rows)


