"""The student of a draft head, and the least-squares fit that it starts from.

A text is drafted from every position at once. Depth 0 reads the full model's hidden states, in one
pass over the text. Depth d reads the output of depth d − 1 at the position before. Its row j
attends to the keys that decoding has in that step: those of depth 0 up to position j − d, those of
depths 1 … d − 1 that the same round made, and itself.

The teacher's output does not change, so it is computed once for each text, as far as memory allows.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; FastMTP (2509.18362), section 3.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.drafters.mtp.weights import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    LAYER_PREFIX,
    PROJECTION,
    InputMix,
    plan_depth,
)
from skipsearch.engine import no_grad, run_layers
from skipsearch.engine.draft_model import can_restrict_head, make_draft_model
from skipsearch.models import weight_overlay
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.models.memory import free_memory
from skipsearch.training.distill_batch import TeacherTargets, compute_teacher_targets, max_head_rows
from skipsearch.training.students import make_appended_layer_trainable

CACHE_FRACTION = 0.25  # of the free memory, for the teacher's output
TEACHER_TEXTS = 64  # texts that the teacher reads at once
FIT_ROWS_PER_INPUT = 12  # rows of text for each input of the projection, in the initial fit
MAX_FIT_TEXTS = 512
RIDGE = 1e-3  # of the mean square of an input


def choose_vocabulary(texts: Tensor, size: int, vocab_size: int) -> Vocabulary | None:
    """Return the tokens that a head is trained to draft; None: all.

    Half of them are the lowest ids, and the others the most frequent tokens of the texts [N, T].
    If the texts have fewer, more of the lowest ids are taken.
    """
    if size <= 0 or size >= vocab_size:
        return None
    lowest = size // 2
    counts = Counter(token for token in texts.flatten().tolist() if token >= lowest)
    frequent = [token for token, _ in counts.most_common(size - lowest)]
    return Vocabulary.from_ids(frequent, size - len(frequent))


class _StepwiseCache(KVCache):
    """A cache of one layer to which each pass adds its K/V, without writing over any.

    So the K/V of several passes can have gradients.
    """

    def __init__(self, n_layers: int, batch_size: int):
        super().__init__(n_layers, batch_size, 0)
        self._steps: list[tuple[Tensor, Tensor]] = []

    def write(
        self, layer: int, key: Tensor, value: Tensor, plan: PassPlan
    ) -> tuple[Tensor, Tensor]:
        self._steps.append((key, value))
        if len(self._steps) == 1:
            return key, value
        keys, values = zip(*self._steps, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


class DraftHeadStudent:
    """A draft head that is trained on `draft_length` steps of its own states.

    fit_texts: [N, T], text for the initial fit of the projection; None: it is loaded afterwards.
    vocabulary: tokens to which the loss is restricted; None: all.
    """

    def __init__(
        self,
        model: HFAdapter,
        fit_texts: Tensor | None,
        vocabulary: Vocabulary | None = None,
        draft_length: int = 3,
    ):
        self.model, self.draft_length = model, draft_length
        n, width = model.spec.n_layers, model.spec.hidden_size
        wide = torch.promote_types(model.spec.dtype, torch.float32)
        adapter = weight_overlay.append_layer(model, n - 1)
        assert isinstance(adapter, HFAdapter)
        self.parameters = make_appended_layer_trainable(
            adapter, n, weight_overlay.SUBLAYER_KINDS, LAYER_PREFIX
        )
        ones = torch.ones(width, dtype=wide, device=model.spec.device)
        self._cached: dict[tuple[int, bytes], tuple[Tensor, ...]] = {}
        self._cache_bytes = int(CACHE_FRACTION * free_memory(model.spec.device))
        self._rows: Any = None  # of the head, by token
        if vocabulary is not None and can_restrict_head(adapter):
            draft_model = make_draft_model(adapter, Reading(vocabulary=vocabulary))
            assert draft_model.new_head is not None
            self._rows = draft_model.new_head()
            adapter = draft_model.restrict(self._rows)  # type: ignore[assignment]
        self.adapter = adapter
        projection = (
            torch.zeros(width, 2 * width, device=model.spec.device)
            if fit_texts is None
            else self._fit_projection(fit_texts)
        )
        mix = InputMix(projection.to(wide), ones, ones.clone())
        names = (PROJECTION, EMBEDDING_NORM, HIDDEN_NORM)
        values = (mix.projection, mix.embedding_norm, mix.hidden_norm)
        self.parameters |= {k: nn.Parameter(v) for k, v in zip(names, values, strict=True)}
        self.mix = InputMix(*(self.parameters[name] for name in names))
        self.facts = {
            "kind": "mtp",
            "ahead": draft_length,
            "vocabulary": None if vocabulary is None else vocabulary.model_dump(),
        }
        skipped = tuple(range(n - 1))
        self.card = {
            "kind": "mtp",
            "form": "layer",
            "attn": skipped,
            "mlp": skipped,
            "rank": None,
            "vocabulary": vocabulary,
        }
        self.file_name = "mtp.safetensors"
        n_values = sum(parameter.numel() for parameter in self.parameters.values())
        self.extra_bytes = n_values * model.spec.dtype.itemsize

    def head(self, h: Tensor) -> Tensor:
        return self.adapter.head(h)

    @no_grad
    def run_teacher(self, texts: Tensor, top_k: int) -> tuple[Tensor, Tensor, TeacherTargets]:
        """Return (texts [B, T], output of the last layer [B, T, H], targets), from memory if there.

        A target that the head has no row for is −1, with probability 0.
        """
        keys = [(top_k, row.tobytes()) for row in texts.cpu().numpy()]
        fresh = dict[tuple[int, bytes], tuple[Tensor, ...]]()
        missing = [i for i, key in enumerate(keys) if key not in self._cached]
        for part in (missing[i : i + TEACHER_TEXTS] for i in range(0, len(missing), TEACHER_TEXTS)):
            hidden, _ = self._run_full_model(texts[part])
            targets = compute_teacher_targets(self.model, hidden, top_k)
            tokens, probs = targets.tokens, targets.probs
            if self._rows is not None:
                tokens = self._rows.rows_of(tokens)
                probs = probs.masked_fill(tokens < 0, 0.0)
            stored = (hidden, tokens.to(torch.int32), probs.to(hidden.dtype))
            fresh |= {keys[i]: row for i, row in zip(part, zip(*stored, strict=True), strict=True)}
        for key, row in fresh.items():
            n_bytes = sum(tensor.nbytes for tensor in row)
            if n_bytes <= self._cache_bytes:
                self._cached[key] = tuple(tensor.clone() for tensor in row)
                self._cache_bytes -= n_bytes
        rows = [self._cached.get(key) or fresh[key] for key in keys]
        hidden, tokens, probs = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return texts, hidden, TeacherTargets(tokens.long(), probs.float())

    def run_draft(
        self, teacher_output: tuple[Tensor, Tensor, TeacherTargets], offset: int
    ) -> tuple[Tensor, TeacherTargets]:
        """Return (input of the draft's head [B, R, H], targets) of all depths, one after the other.

        Depth d (from 0) has the rows d … T − 2. offset: not used.
        """
        texts, hidden, targets = teacher_output
        n_rows = texts.shape[1] - 1
        embedded, states = self._embed(texts[:, 1:]), hidden[:, :-1]
        cache, outputs = _StepwiseCache(self.model.spec.n_layers + 1, len(texts)), list[Tensor]()
        for depth in range(self.draft_length):
            x = self.mix(embedded[:, depth:], states)
            plan = plan_depth(n_rows, depth, texts.device)
            outputs.append(
                self.adapter.block(self.model.spec.n_layers, x, cache, plan, attn=True, mlp=True)
            )
            states = outputs[-1][:, :-1]
        chosen = [slice(1 + depth, None) for depth in range(self.draft_length)]
        return torch.cat(outputs, dim=1), TeacherTargets(
            torch.cat([targets.tokens[:, rows] for rows in chosen], dim=1),
            torch.cat([targets.probs[:, rows] for rows in chosen], dim=1),
        )

    @no_grad
    def measure_alpha_by_depth(self, texts: Tensor) -> list[float]:
        """Return the acceptance of each draft step, if all earlier steps were accepted.

        texts: [N, T]. Rounds in which the text is not what the model would choose count up to that
        token.
        """
        n_rows = texts.shape[1] - 1
        accepted = torch.zeros(self.draft_length)
        reached_count = torch.zeros(self.draft_length)
        for batch in texts.split(16):
            output = self.run_teacher(batch.long().to(self.model.spec.device), 1)
            hidden, targets = self.run_draft(output, 0)
            rows, max_rows = hidden.flatten(0, 1), max_head_rows(self.model)
            choice = torch.cat(
                [self.head(some[None])[0].argmax(-1) for some in rows.split(max_rows)]
            )
            agrees = choice.view(hidden.shape[:2]) == targets.tokens[..., 0]
            following = output[0][:, 2:]
            if self._rows is not None:
                following = self._rows.rows_of(following)
            follows = output[2].tokens[:, 1:-1, 0] == following  # the model would choose the text
            reached = torch.ones_like(agrees[:, :n_rows])
            for depth, right in enumerate(
                agrees.split([n_rows - depth for depth in range(self.draft_length)], dim=1)
            ):
                accepted[depth] += (right & reached).sum().cpu()
                reached_count[depth] += reached.sum().cpu()
                reached = (right & reached)[:, :-1] & follows[:, depth:]
        return (accepted / reached_count.clamp(min=1)).tolist()

    def _embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with torch.no_grad():
            return self.model.embed(tokens, positions)

    def _run_full_model(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the input of the last layer, [B, T, H] each."""
        model, inputs = self.model, dict[int, Tensor]()
        plan = Planner(texts.shape[1], texts.device).plan_chain(0, texts.shape[1], len(texts))
        hidden = run_layers(
            model,
            model.embed(texts, plan.positions),
            model.new_cache(len(texts), texts.shape[1]),
            plan,
            tap=inputs.__setitem__,
        )
        return hidden, inputs[model.spec.n_layers - 1]

    @no_grad
    def _fit_projection(self, texts: Tensor) -> Tensor:
        """Return the projection [H, 2H] that predicts the last layer's input best.

        The head's layer begins as a copy of the model's last layer. It agrees with the model in
        part, if its input at a row is like the last layer's input at the next token. A ridge
        regression fits that. Rows are weighted by the inverse mean square of what they predict,
        because a few tokens of each text have very large states.
        """
        width, device = self.model.spec.hidden_size, self.model.spec.device
        ones = torch.ones(width, dtype=torch.float32, device=device)
        identity = torch.eye(2 * width, dtype=torch.float32, device=device)
        mix = InputMix(identity, ones, ones)
        n_texts = min(MAX_FIT_TEXTS, -(-FIT_ROWS_PER_INPUT * 2 * width // texts.shape[1]))
        gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64, device=device)
        cross = torch.zeros(2 * width, width, dtype=torch.float64, device=device)
        for part in texts[:n_texts].split(TEACHER_TEXTS):
            batch = part.long().to(device)
            hidden, last_input = self._run_full_model(batch)
            inputs = mix(self._embed(batch[:, 1:]).float(), hidden[:, :-1].float()).flatten(0, 1)
            wanted = last_input[:, 1:].float().flatten(0, 1)
            weights = wanted.square().mean(dim=-1, keepdim=True).clamp(min=1e-6).rsqrt()
            inputs, wanted = inputs * weights, wanted * weights
            gram += (inputs.T @ inputs).double()
            cross += (inputs.T @ wanted).double()
        gram += RIDGE * gram.diagonal().mean() * identity.double()
        return torch.linalg.solve(gram, cross).T.contiguous()
