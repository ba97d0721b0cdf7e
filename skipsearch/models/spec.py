"""What is known of a loaded model, and the port every model is driven through."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.mask import SkipMask


@dataclass(frozen=True)
class ModelSpec:
    """Identity and shape of a loaded model. context: longest sequence it can be driven on, None if it does not say.

    dtype: of activations, and of weights that are not quantised. device: where tokens go in and logits come out.
    n_devices: GPUs that the layers are spread over. engine: what drives it: "hf", the unmodified modules; "lean", fused weights; …

    recurrent: layers keep a state that stands at one place of the text, so passes are chains (`models/recurrent.py`). together: texts of
    several lengths can go through one pass.

    config_sha256, weights_sha256: of the canonical config and of the weight files; None where there are no files.
    """

    id: str
    revision: str | None
    family: str
    n_layers: int
    hidden: int
    vocab: int
    context: int | None
    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    config_sha256: str | None = None
    weights_sha256: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    n_devices: int = 1
    engine: str = "hf"
    recurrent: bool = False
    together: bool = True

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        """One line for people: what was loaded, as what, and where."""
        where = f"{self.n_devices} GPUs" if self.n_devices > 1 else str(self.device)
        return f"{self.id} ({self.family}, {self.n_layers} layers) as {self.quantization or self.dtype_name} on {where}"


@dataclass(frozen=True)
class Scored:
    """What a token is chosen by. weights: [B, 1], the choice itself where it is greedy, else [B, V], what it is to be drawn from.

    confidence: [B], the top probability; None if nobody asked for it.
    """

    weights: Tensor
    confidence: Tensor | None


class Scorer(Protocol):
    """Scores logits without drawing anything, so that an engine may record it together with the pass.

    key: equal for scorers that do the same.
    """

    @property
    def key(self) -> Hashable: ...

    def score(self, logits: Tensor, confidence: bool) -> Scored:
        """logits: [B, V]."""


class LayerRunner(Protocol):
    def __call__(self, given: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, first: int, last: int,
                 logits: bool = False, last_only: bool = False) -> Tensor:
        """The layers first … last − 1 of a pass, in one piece.

        given: what goes into the first of them, [B, T, H], or tokens [B, T] where that is layer 0. Returns what leaves the last one; with
        `logits`, what the head makes of it: [B, T, V], or [B, 1, V] with last_only.
        """


class PassRunner(Protocol):
    """An engine that may have a whole pass ready. run_layers: None for one whose passes neither begin nor end in the middle."""

    @property
    def run_layers(self) -> LayerRunner | None: ...

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor | None:
        """As `engine.forward`; None leaves the pass to the layer loop."""

    def run_scored(self, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer, confidence: bool) -> Scored | None:
        """As `engine.draft_step`; None leaves it to a pass and the scorer."""

    def run_draft(self, token: Tensor, cache: KVCache, planner: Planner, mask: SkipMask, scorer: Scorer, most: int,
                  threshold: float) -> Scored | None:
        """As `engine.draft_chain`; None leaves it to draft steps."""


class ModelAdapter(Protocol):
    """A decoder-only model as an embedding, a list of blocks and a head. Its unit is the block, because families with a
    parallel residual compute attention and MLP from one input. A pass over tokens [B, T] without the MLP of layer 2 is

        h = model.embed(tokens, plan.positions)
        for i in range(model.spec.n_layers):
            h = model.block(i, h, cache, plan, mlp=i != 2)
        logits = model.head(h)   # [B, T, V]

    which is what `engine.forward` does. plan (`cache.PassPlan`) says where each row stands, in which slot of the cache its K/V go, and
    what it may see.

    One adapter serves any number of threads, each with a cache of its own. passes: whole passes that the engine has ready; None: it has
    none, and every pass goes layer by layer.
    """

    spec: ModelSpec
    tokenizer: Any
    @property
    def passes(self) -> PassRunner | None: ...

    @property
    def weight_bytes(self) -> int:
        """Of all weights, each once."""

    @property
    def read_bytes(self) -> int:
        """Of the weights that a pass over one token reads: all but the embeddings of other tokens."""

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T] int64 -> [B, T, H]. positions: the plan's; families that learned theirs (GPT-2, OPT) refuse to go without."""

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        """Layer i without the sub-layers that are off; [B, T, H] -> [B, T, H]. Attention writes K/V where `plan` says."""

    def head(self, h: Tensor) -> Tensor:
        """Final norm and language-model head: [B, T, H] -> [B, T, V]."""
