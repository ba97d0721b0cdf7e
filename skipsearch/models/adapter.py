"""The facts of a loaded model, and the interface through which every model is run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner


@dataclass(frozen=True)
class ModelSpec:
    """Identity and shape of a loaded model."""

    id: str  # Hub id, folder name or alias
    revision: str | None
    family: str  # `model_type` of the config
    n_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int | None  # the longest sequence in tokens; None: the model does not say
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    device: torch.device  # of token ids and logits
    quantization: str | None = None
    config_sha256: str | None = None  # of the canonical config; None: not loaded from files
    weights_sha256: str | None = None  # of the weight files; None: not loaded from files
    eos_token_ids: tuple[int, ...] = ()
    n_devices: int = 1  # GPUs that the layers are spread over
    engine: str = "hf"  # of the passes: "hf" (unmodified modules), "lean" (fused weights), …
    is_recurrent: bool = False  # layers have a recurrent state, so every pass is a chain
    ragged_batches: bool = True  # texts of different lengths may share a pass
    # Layers whose K/V later layers read, too. Their attention is never skipped.
    lending_layers: frozenset[int] = frozenset()
    # What the model's author recommends: `temperature`, `top_p`, `top_k`, `min_p` and
    # `repetition_penalty`, those of them that are named.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def facts(self) -> dict[str, Any]:
        """Return the facts that a profile records, by their keys in a profile."""
        return {
            "id": self.id,
            "revision": self.revision,
            "family": self.family,
            "n_layers": self.n_layers,
            "config_sha256": self.config_sha256,
            "weights_sha256": self.weights_sha256,
            "dtype": self.dtype_name,
            "quantization": self.quantization,
        }

    def __str__(self) -> str:
        place = f"{self.n_devices} GPUs" if self.n_devices > 1 else str(self.device)
        number_format = self.quantization or self.dtype_name
        return f"{self.id} ({self.family}, {self.n_layers} layers) as {number_format} on {place}"


@dataclass(frozen=True)
class DraftScores:
    """The scores from which the next token of each text is chosen: a choice, or a distribution."""

    # [B, n] ids of the n most likely tokens, best first; or drawn tokens, if an engine drew them
    choice: Tensor | None = None
    probs: Tensor | None = None  # [B, V] distribution to draw from, or drawn from; None: greedy
    confidence: Tensor | None = None  # [B] top probability; None: not requested


@dataclass(frozen=True)
class DrawSettings:
    """How an engine draws the tokens of a draft itself.

    The distribution is softmax(logits / temperature), of which top_k and then top_p keep the most
    likely tokens. top_p: 1 keeps all. top_k: 0 keeps all. Each token takes one uniform number of
    the generator.
    """

    temperature: float
    top_p: float
    top_k: int
    generator: torch.Generator


class DraftScorer(Protocol):
    """A scorer of logits that makes no random draws.

    An engine may therefore capture its work as a part of a pass (engine `graph`).
    """

    @property
    def draw_settings(self) -> DrawSettings | None:
        """How tokens are drawn from the scores; None: greedily, or by other rules."""

    @property
    def key(self) -> Hashable:
        """A key. Scorers with equal keys compute equal scores from equal logits."""

    @property
    def is_greedy(self) -> bool:
        """Whether scores are the `n_choices` most likely tokens, without a distribution."""

    @property
    def n_choices(self) -> int:
        """The number of tokens that are chosen: the choice and its siblings."""

    def score(self, logits: Tensor, with_confidence: bool) -> DraftScores:
        """Return the scores from which tokens are chosen.

        logits: [B, V]. with_confidence: include the top probability of the distribution from which
        the token is drawn. For a greedy scorer, this is the plain softmax.
        """


class LayerRunner(Protocol):
    """A function that runs several layers of a pass at once."""

    def __call__(
        self,
        tokens_or_hidden: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | None,
        first_layer: int,
        end_layer: int,
        with_head: bool = False,
        last_only: bool = False,
    ) -> Tensor:
        """Run layers `first_layer` … `end_layer` − 1, and the head if `with_head`.

        tokens_or_hidden: hidden states [B, T, H], or token ids [B, T] if `first_layer` is 0.
        Returns hidden states [B, T, H]; with the head, logits [B, T, V], or [B, 1, V] if
        `last_only`."""


@runtime_checkable
class HiddenRunner(Protocol):
    """A model that can only run whole passes, and shows the input of its head."""

    def run_with_hidden(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        """Run a pass as `PassRunner.run` does; return (logits, input of the head [B, T, H])."""


class PassRunner(Protocol):
    """An engine that may run whole passes. Methods return None for a pass that it cannot run."""

    @property
    def run_layers(self) -> LayerRunner | None:
        """A function that runs several layers; None if the engine can only run whole passes."""
        return None

    def run(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> Tensor | None:
        """Run a pass as `engine.forward` does; None: the layer loop must run it."""

    def run_draft_step(
        self,
        token: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask,
        scorer: DraftScorer,
        with_confidence: bool,
    ) -> DraftScores | None:
        """Run `engine.draft_step`; None: run a pass, then the scorer."""
        return None

    def run_draft_chain(
        self,
        tokens: Tensor,
        cache: KVCache,
        planner: Planner,
        mask: SkipMask,
        scorer: DraftScorer,
        max_tokens: int,
        threshold: float,
    ) -> DraftScores | None:
        """Run `engine.draft_chain`; None: run single draft steps."""
        return None


class ModelAdapter(Protocol):
    """A decoder-only model as an embedding, a list of blocks and a head.

    The smallest unit is the block, because families with a parallel residual compute attention and
    MLP from the same input. A pass over tokens [B, T] without the MLP of layer 2 is

        h = model.embed(tokens, plan.positions)
        for i in range(model.spec.n_layers):
            h = model.block(i, h, cache, plan, mlp=i != 2)
        logits = model.head(h)   # [B, T, V]

    as in `engine.forward`. The plan gives each token its position, the cache slot of its K/V, and
    the slots that it attends to.

    Any number of threads may share an adapter, each with a separate cache."""

    spec: ModelSpec
    tokenizer: Any

    @property
    def pass_runner(self) -> PassRunner | None:
        """The engine's runner of whole passes. None: every pass runs layer by layer."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights. Shared weights are counted once."""

    @property
    def read_bytes(self) -> int:
        """The bytes of weights that a pass over one token reads.

        The embeddings of other tokens are not among them.
        """

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed token ids [B, T] int64 as [B, T, H].

        positions: of the plan, [B, T]. Families with learned positions (GPT-2, OPT) require them.
        """

    def block(
        self,
        i: int,
        h: Tensor,
        cache: KVCache,
        plan: PassPlan,
        *,
        attn: bool = True,
        mlp: bool = True,
    ) -> Tensor:
        """Run layer i without the sub-layers that are off: [B, T, H] -> [B, T, H].

        Attention writes its K/V to the plan's slots."""

    def head(self, h: Tensor) -> Tensor:
        """Apply the final norm and the language-model head: [B, T, H] -> [B, T, V]."""
