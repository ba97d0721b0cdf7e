"""The student of a draft head, and the least-squares fit that it starts from.

A text is drafted from every position of its answer at once. Depth 0 reads the full model's hidden
states, in one pass over the text. Depth d reads the output of depth d − 1 at the position before.
A round that starts at row j attends to the keys that decoding has in that step: those of depth 0 up
to row j, and its own of depths 1 … d.

The teacher's output does not change, so it is computed once for each text, and read from a file.
Several texts share a window of rows, and attend to themselves alone.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; FastMTP (2509.18362), section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.core.reading import MAX_TOKENS_TEXT, Reading, Vocabulary, format_ids
from skipsearch.drafters.mtp.weights import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    LAYER_PREFIX,
    PROJECTION,
    InputMix,
)
from skipsearch.engine import no_grad, run_layers
from skipsearch.engine.native import NativeAdapter
from skipsearch.engine.reduced_model import can_restrict_head, make_reduced_model
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.fused.unfused_layer import unfuse_last_layer
from skipsearch.models.head_rows import HeadRows, fill_up
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner
from skipsearch.training.distill_batch import TeacherTargets, compute_teacher_targets, max_head_rows
from skipsearch.training.feature_file import NO_TEXT, FeatureFile, Features
from skipsearch.training.students import make_appended_layer_trainable

TEACHER_TEXTS = 64  # texts that the fit reads at once
FIT_ROWS_PER_INPUT = 12  # rows of text for each input of the projection, in the initial fit
MAX_FIT_TEXTS = 512
RIDGES = (1e-3, 3e-2, 1.0)  # that are tried
FIT_ASIDE_ONE_IN = 8  # texts by which a ridge is chosen


def choose_vocabulary(tokens: Iterable[int], size: int, vocab_size: int) -> Vocabulary | None:
    """Return the tokens that a head is trained to draft; None: all.

    They are the most frequent of `tokens`. If these are fewer, or if a profile cannot hold the ids
    of all of them, the lowest ids are added.
    """
    if size <= 0 or size >= vocab_size:
        return None
    frequent = [token for token, _ in Counter(tokens).most_common(size)]
    while True:
        lowest, missing = 0, size - len(frequent)
        known = set(frequent)
        while missing:
            missing -= lowest not in known
            lowest += 1
        if len(format_ids(token for token in frequent if token >= lowest)) <= MAX_TOKENS_TEXT:
            return Vocabulary.from_ids(frequent, lowest)
        frequent = frequent[: len(frequent) * 9 // 10]


@dataclass(frozen=True)
class HeadLesson:
    """Texts of one length with the full model's output, [B, T, …]."""

    tokens: Tensor
    hidden: Tensor  # output of the last layer
    targets: TeacherTargets  # −1: a token that the head has no row for, with probability 0
    # The text of each position, and whether a round of drafts may start there, [B, T]. None: each
    # row is one text, and every position counts.
    text_numbers: Tensor | None = None
    starts_round: Tensor | None = None

    def counts(self, depth: int) -> Tensor:
        """Return whether step `depth` of a round that starts at each row is trained on, [B, T − 1].

        The round starts in the answer, and the drafted token is in the same text.
        """
        if self.text_numbers is None or self.starts_round is None:
            n_texts, n_rows = self.tokens[:, 1:].shape
            rows = torch.arange(n_rows, device=self.tokens.device)
            return (rows + depth < n_rows).expand(n_texts, n_rows)
        drafted = F.pad(self.text_numbers[:, 2 + depth :], (0, 1 + depth), value=NO_TEXT)
        return self.starts_round[:, :-1] & (self.text_numbers[:, :-1] == drafted)

    def list_rounds(self) -> Tensor:
        """Return the rows at which rounds of two steps or more start, [B, R].

        A text with fewer of them than another one has other rows after them.
        """
        counted = self.counts(1).byte()
        n_rounds = max(1, int(counted.sum(dim=1).max()))
        return counted.sort(dim=1, descending=True, stable=True).indices[:, :n_rounds]


@dataclass(frozen=True)
class DraftStep:
    """The output of one draft step in R rounds of each text."""

    states: Tensor  # [B, R, H]
    rounds: Tensor  # [B, R], the row at which each round starts
    counted: Tensor  # [B, R], whether it is trained on


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
    features: the full model's output at the rows of windows, [N, T], which then replace texts;
    None: the full model runs in each step.
    """

    def __init__(
        self,
        model: HFAdapter | NativeAdapter,
        fit_texts: Tensor | None,
        vocabulary: Vocabulary | None = None,
        draft_length: int = 3,
        features: FeatureFile | None = None,
    ):
        self.model, self.draft_length, self.features = model, draft_length, features
        n, width = model.spec.n_layers, model.spec.hidden_size
        wide = torch.promote_types(model.spec.dtype, torch.float32)
        self._rows: HeadRows | None = None  # of the head, by token
        self.adapter, self._layer = self._copy_last_layer(vocabulary)
        self.parameters = make_appended_layer_trainable(
            self.adapter, self._layer, weight_overlay.SUBLAYER_KINDS, LAYER_PREFIX
        )
        ones = torch.ones(width, dtype=wide, device=model.spec.device)
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
            "features": None if features is None else features.sha256,
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

    def _copy_last_layer(self, vocabulary: Vocabulary | None) -> tuple[HFAdapter, int]:
        """Return a model with a copy of the last layer and of the final norm, and its number."""
        model = self.model
        if isinstance(model, NativeAdapter):
            vocab_size = model.spec.vocab_size
            ids = torch.arange(vocab_size)
            if vocabulary is not None:
                ids = torch.tensor(fill_up(vocabulary.token_ids(), vocab_size, 1))
                self._rows = HeadRows(vocab_size, ids)
            return unfuse_last_layer(model.fused_model, ids), 0
        adapter = weight_overlay.append_layer(model, model.spec.n_layers - 1)
        assert isinstance(adapter, HFAdapter)
        if vocabulary is not None and can_restrict_head(adapter):
            reduced_model = make_reduced_model(adapter, Reading(vocabulary=vocabulary))
            assert reduced_model.new_head is not None
            self._rows = reduced_model.new_head()
            adapter = reduced_model.restrict(self._rows)  # type: ignore[assignment]
        return adapter, model.spec.n_layers

    def head(self, h: Tensor) -> Tensor:
        return self.adapter.head(h)

    @no_grad
    def run_teacher(self, texts: Tensor, top_k: int) -> HeadLesson:
        """Return what is taught about texts, or about windows of features, [B, T]."""
        if self.features is None:
            hidden, _ = run_full_model(self.model, texts)
            targets = compute_teacher_targets(self.model, hidden, top_k)
            return HeadLesson(texts, hidden, self._find_rows(targets))
        device, shape = self.model.spec.device, texts.shape
        rows = texts.cpu().flatten()
        read, stored = self.features.read(rows), self.features.list_rows(rows)
        tokens, probs = (
            values[:, :top_k].unflatten(0, shape).to(device)
            for values in (read.targets.tokens, read.targets.probs)
        )
        return HeadLesson(
            stored.tokens.view(shape).to(device),
            read.hidden.unflatten(0, shape).to(device, self.model.spec.dtype),
            self._find_rows(TeacherTargets(tokens, probs)),
            stored.text_numbers.view(shape).to(device),
            stored.starts_round.view(shape).to(device),
        )

    def _find_rows(self, targets: TeacherTargets) -> TeacherTargets:
        """Return targets by rows of the head."""
        if self._rows is None:
            return targets
        tokens = self._rows.rows_of(targets.tokens)
        return TeacherTargets(tokens, targets.probs.masked_fill(tokens < 0, 0.0))

    def run_draft(self, lesson: HeadLesson, offset: int) -> tuple[Tensor, TeacherTargets]:
        """Return (input of the draft's head [1, N, H], targets) of the rows that count.

        Those of depth 0 come first. offset: not used.
        """
        steps = self._run_depths(lesson)
        targets = [self._targets_of(lesson, depth, step) for depth, step in enumerate(steps)]

        def join(parts: Sequence[Tensor]) -> Tensor:
            chosen = [part[step.counted] for part, step in zip(parts, steps, strict=True)]
            return torch.cat(chosen)[None]

        return join([step.states for step in steps]), TeacherTargets(
            join([target.tokens for target in targets]), join([target.probs for target in targets])
        )

    def _run_depths(self, lesson: HeadLesson) -> list[DraftStep]:
        """Return the draft steps: the first at all rows, the others in the rounds that count."""
        n_texts, n_rows = lesson.tokens[:, 1:].shape
        numbers = None if lesson.text_numbers is None else lesson.text_numbers[:, :-1]
        embedded, states = self._embed(lesson.tokens[:, 1:]), lesson.hidden[:, :-1]
        cache, steps = _StepwiseCache(self._layer + 1, n_texts), list[DraftStep]()
        rounds = torch.arange(n_rows, device=states.device).expand(n_texts, n_rows)
        for depth in range(self.draft_length):
            if depth == 1:
                rounds = lesson.list_rounds()
                states = _take_rows(states, rounds)
            x = self.mix(_take_rows(embedded, rounds + depth), states)
            plan = plan_rounds(rounds, depth, n_rows, numbers)
            states = self.adapter.block(self._layer, x, cache, plan, attn=True, mlp=True)
            steps.append(DraftStep(states, rounds, lesson.counts(depth).gather(1, rounds)))
        return steps

    def _targets_of(self, lesson: HeadLesson, depth: int, step: DraftStep) -> TeacherTargets:
        rows, targets = step.rounds + 1 + depth, lesson.targets
        return TeacherTargets(_take_rows(targets.tokens, rows), _take_rows(targets.probs, rows))

    @no_grad
    def measure_alpha_by_depth(self, texts: Tensor) -> list[float]:
        """Return the acceptance of each draft step, if all earlier steps were accepted.

        texts: [N, T]. Rounds in which the text is not what the model would choose count up to that
        token.
        """
        accepted = torch.zeros(self.draft_length)
        reached_count = torch.zeros(self.draft_length)
        for batch in texts.split(16):
            lesson = self.run_teacher(batch.long().to(self.model.spec.device), 1)
            following = lesson.tokens[:, 2:]
            if self._rows is not None:
                following = self._rows.rows_of(following)
            # Whether the model would choose the text.
            follows = lesson.targets.tokens[:, 1:-1, 0] == following
            reached = lesson.counts(0)  # by the row at which the round starts
            for depth, step in enumerate(self._run_depths(lesson)):
                counted = step.counted & reached.gather(1, step.rounds)
                max_rows = max_head_rows(self.model)
                choice = [
                    self.head(rows[None])[0].argmax(-1)
                    for rows in step.states[counted].split(max_rows)
                ]
                right = torch.zeros_like(counted)
                wanted = self._targets_of(lesson, depth, step).tokens[..., 0]
                right[counted] = torch.cat(choice) == wanted[counted]
                accepted[depth] += right.sum().cpu()
                reached_count[depth] += counted.sum().cpu()
                right &= _take_rows(follows[..., None], step.rounds + depth)[..., 0]
                reached = torch.zeros_like(reached).scatter(1, step.rounds, right)
        return (accepted / reached_count.clamp(min=1)).tolist()

    def _embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with torch.no_grad():
            return self.model.embed(tokens, positions)

    @no_grad
    def _fit_projection(self, texts: Tensor) -> Tensor:
        """Return the projection [H, 2H] that predicts the last layer's input best.

        The head's layer begins as a copy of the model's last layer. It agrees with the model in
        part, if its input at a row is like the last layer's input at the next token. A ridge
        regression fits that. Its ridge is the one that predicts texts kept aside best, because few
        texts have fewer rows than there are inputs.
        """
        width = self.model.spec.hidden_size
        n_texts = min(MAX_FIT_TEXTS, -(-FIT_ROWS_PER_INPUT * 2 * width // texts.shape[1]))
        texts = texts[:n_texts]
        n_aside = max(1, len(texts) // FIT_ASIDE_ONE_IN) if len(texts) > 1 else 0
        gram, cross = self._sum_fit(texts[n_aside:])
        gram_aside, cross_aside = self._sum_fit(texts[:n_aside])

        def compute_error(projection: Tensor) -> float:
            """Return the squared error on the texts kept aside, up to a constant."""
            square = (projection @ gram_aside * projection).sum()
            return float(square - 2 * (projection.T * cross_aside).sum())

        ridge = RIDGES[0]
        if n_aside:
            ridge = min(RIDGES, key=lambda ridge: compute_error(_solve_ridge(gram, cross, ridge)))
        return _solve_ridge(gram + gram_aside, cross + cross_aside, ridge).contiguous()

    def _sum_fit(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return (inputsᵀ inputs [2H, 2H], inputsᵀ outputs [2H, H]) of a fit, in float64.

        Rows are weighted by the inverse mean square of what they predict, because a few tokens of
        each text have very large states.
        """
        width, device = self.model.spec.hidden_size, self.model.spec.device
        ones = torch.ones(width, dtype=torch.float32, device=device)
        mix = InputMix(torch.eye(2 * width, dtype=torch.float32, device=device), ones, ones)
        gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64, device=device)
        cross = torch.zeros(2 * width, width, dtype=torch.float64, device=device)
        for part in texts.split(TEACHER_TEXTS) if len(texts) else ():
            tokens, hidden, last_input, same_text = self._read_fit_rows(part)
            inputs = mix(self._embed(tokens[:, 1:]).float(), hidden[:, :-1].float())[same_text]
            wanted = last_input[:, 1:].float()[same_text]
            weights = wanted.square().mean(dim=-1, keepdim=True).clamp(min=1e-6).rsqrt()
            inputs, wanted = inputs * weights, wanted * weights
            gram += (inputs.T @ inputs).double()
            cross += (inputs.T @ wanted).double()
        return gram, cross

    def _read_fit_rows(self, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (tokens [B, T], output and input of the last layer [B, T, H], rows [B, T − 1]).

        rows: whether the next token is of the same text, and not its last, which has no features.
        """
        device, shape = self.model.spec.device, texts.shape
        if self.features is None:
            tokens = texts.long().to(device)
            rows = torch.ones(shape[0], shape[1] - 1, dtype=torch.bool, device=device)
            return tokens, *run_full_model(self.model, tokens), rows
        read = self.features.read(texts.flatten())
        stored = self.features.list_rows(texts.flatten())
        tokens, hidden, last_input, numbers = (
            values.unflatten(0, shape).to(device)
            for values in (stored.tokens, read.hidden, read.last_input, stored.text_numbers)
        )
        is_last = numbers[:, 1:] != F.pad(numbers[:, 2:], (0, 1), value=NO_TEXT)
        rows = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] != NO_TEXT) & ~is_last
        return tokens, hidden, last_input, rows


def plan_rounds(
    rounds: Tensor, depth: int, n_rows: int, text_numbers: Tensor | None = None
) -> PassPlan:
    """Plan the pass of draft step `depth`, from 0, of rounds.

    rounds: [B, R], the row at which each starts; at depth 0, all n_rows rows of a text. The keys of
    depth 0 come first; those of each later depth follow, one for each round. A round attends to the
    keys of depth 0 up to the row at which it starts, and to those of its own later steps.
    text_numbers: [B, n_rows], the text of each row; a row attends to rows of its text alone. None:
    all rows are of one text.
    """
    n_rounds, device = rounds.shape[1], rounds.device
    rows = torch.arange(n_rows, device=device)
    visible = rows <= rounds[..., None]  # [B, R, n_rows]
    if text_numbers is not None:
        of_rounds = text_numbers.gather(1, rounds)
        visible = visible & (text_numbers[:, None] == of_rounds[..., None])
    own = torch.eye(n_rounds, dtype=torch.bool, device=device).expand(len(rounds), -1, -1)
    depths = range(1, depth + 1)
    n_keys = n_rows + depth * n_rounds
    return PassPlan(
        rounds + depth,
        torch.arange(n_keys - n_rounds, n_keys, device=device)[None],
        n_keys,
        torch.cat([visible, *(own for _ in depths)], dim=2)[:, None],
        n_keys - n_rounds,
        key_positions=torch.cat(
            [rows.expand(len(rounds), -1), *(rounds + step for step in depths)], dim=1
        ),
    )


def _take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return rows of values, [B, T, H] and [B, R] -> [B, R, H]; after the last row, the last."""
    rows = rows.clamp(max=values.shape[1] - 1)[..., None]
    return values.gather(1, rows.expand(-1, -1, values.shape[2]))


def _solve_ridge(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return the projection [H, 2H] of a ridge regression. ridge: of the mean square of an input.

    gram: [2H, 2H]. cross: [2H, H].
    """
    damping = torch.full_like(gram.diagonal(), ridge * float(gram.diagonal().mean()))
    factor = torch.linalg.cholesky(gram + damping.diag())
    return torch.cholesky_solve(cross, factor).T


@no_grad
def run_full_model(model: ModelAdapter, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the input of the last layer, [B, T, H] each. texts: [B, T]."""
    inputs = dict[int, Tensor]()
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
def compute_features(
    model: ModelAdapter, tokens: Sequence[int], top_k: int, states: Tensor | None = None
) -> Features:
    """Return the features of a text.

    A model that rounds the inputs of its matrices rounds them here as it does when it verifies.
    states: those that the model computed when it wrote the text (`Continuation.states`); None: they
    are computed by one pass. They miss the last token, whose features are 0: no draft reads them.
    """
    if states is None:
        hidden, last_input = run_full_model(model, torch.tensor([tokens], device=model.spec.device))
    else:
        known = states[:, : len(tokens)]
        last_input, hidden = F.pad(known, (0, 0, 0, len(tokens) - known.shape[1]))[:, None]
    targets = compute_teacher_targets(model, hidden, top_k)
    return Features(hidden[0], last_input[0], TeacherTargets(targets.tokens[0], targets.probs[0]))
