"""Write the text that a draft head is trained on: requests, the model's answers, their features.

Requests are the user's own prompts, the instructions of the task `chat`, and requests that the
model writes itself when its chat template begins a user turn; every other one of these begins with
the first words of one of the prompts, so that they are of the same kinds. Requests come in waves,
so that a training of any length has all kinds. An answer that a search stored already is read from
the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from torch import Tensor

from skipsearch.core.files import hash_facts
from skipsearch.decoding.repetition import find_loop_start
from skipsearch.engine.sampler import SamplingParams
from skipsearch.errors import ModuleError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.chat.chat_text import (
    encode_prompt,
    encode_text,
    get_chat_template,
    render_user_turn,
)
from skipsearch.replay.reference_text import (
    MIN_TEXTS,
    TextSettings,
    TextStore,
    write_reference_text,
)
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import Task, load_task
from skipsearch.tasks.sources.data_files import is_data_file
from skipsearch.training.corpus import (
    BEGINNING_SHARE,
    WINDOW_TOKENS,
    Corpus,
    list_beginnings,
    read_documents,
    refuse_holdout,
    token_windows,
)
from skipsearch.training.draft_head_student import compute_features
from skipsearch.training.feature_file import FeatureFile, StoredText
from skipsearch.tuning.events import StageProgress, StageStarted

OWN_TASK = "chat"  # only its calibration split
WAVE = 64  # requests; those of similar length and settings are answered together
USER_SHARE = 48  # of them, while there are prompts of the user
OPENING_WORDS = 3  # of a prompt, with which a request begins that the model writes
REQUEST_TOKENS = 160  # of a request that the model writes; a longer one is dropped
FEW_TEXTS = 8  # of which windows are not longer than the longest
MIN_ANSWER_TOKENS = 4
MIN_GROUP_SPREAD = 32  # tokens; prompts of more than twice the length are answered later
MAX_IDLE_WAVES = 3  # in a row without a new text, after which there is none to expect
PACKED_TOKENS = 512  # rows of a window
READINGS = 3  # times that the training reads each text, if its time allows
MAX_TEXT_SHARE = 0.6  # of the budget
VALIDATION_ONE_IN, MAX_VALIDATION_TEXTS = 16, 16
MARK = "SKIPSEARCH"  # stands for the request where the template is cut


@dataclass(frozen=True)
class HeadRequest:
    """A prompt that the model answers, or a text that is read as it is."""

    tokens: tuple[int, ...]
    settings: TextSettings | None  # of the answer; None: there is none


@dataclass(frozen=True)
class AnsweredText:
    """The tokens of a request and its answer."""

    tokens: list[int]
    n_prompt: int  # tokens of the request
    states: Tensor | None = None  # see `Continuation`


@dataclass(frozen=True)
class TextLimits:
    """When there is text enough."""

    seconds: float | None  # for text, features and training; None: no limit
    trained_tokens_per_s: float
    n_tokens: int  # the most tokens

    def share_done(self, file: FeatureFile) -> float:
        """Return the share of the text that is there; 1 or more is enough."""
        share = file.n_tokens / self.n_tokens
        if self.seconds is not None:
            training_s = READINGS * file.n_tokens / self.trained_tokens_per_s
            left_s = self.seconds - file.seconds
            share = max(
                share,
                training_s / left_s if left_s > 0 else 1.0,
                file.seconds / (MAX_TEXT_SHARE * self.seconds),
            )
        return share


class HeadRequests:
    """The requests of a training, in waves that depend on their number and the seed alone.

    data: files of prompts, as `tune --task FILE` reads them, and files or folders of text. task:
    its calibration prompts are requests, too. self_generated: text is continued, not read.
    temperature: of answers; 0 leaves that of the task.
    Raises: TaskError; ModuleError.
    """

    def __init__(
        self,
        model: ModelAdapter,
        data: Sequence[Path],
        task: Task | None,
        self_generated: bool,
        temperature: float,
        seed: int,
    ):
        self.model, self.seed, self.temperature = model, seed, temperature
        has_template = get_chat_template(model.tokenizer) is not None
        self.given, self.own = list[HeadRequest](), list[HeadRequest]()
        self._openings = list[str]()  # of the requests that the model writes
        reads_text, sources = False, list[str]()
        if task is not None:
            self.given += self._list_prompts(task)
            sources.append(f"calibration prompts of task {task.name}")
        for path in data:
            sources.append(path.name)
            if is_data_file(path):
                self.given += self._list_prompts(load_task(path, chat=self._is_chat(path)))
            else:
                self.given += self._read_text(path, task, self_generated)
                reads_text |= not self_generated
        self.writes_requests = has_template and not reads_text
        if self.writes_requests:
            own = self._list_prompts(load_task(OWN_TASK))
            self.own = [r for r in own if len(r.tokens) <= PACKED_TOKENS // 2]
            sources.append(f"instructions of skipsearch, and requests of {model.spec.id}")
        # Without prompts and template, the model begins from nothing.
        self.is_endless = self.writes_requests or not self.given
        self.description = (
            f"{', '.join(sources) or 'nothing'}; "
            f"{'read' if reads_text else 'answered'} by {model.spec.id}"
        )
        random.Random(seed).shuffle(self.given)
        random.Random(seed).shuffle(self.own)
        random.Random(seed).shuffle(self._openings)

    @property
    def sha256(self) -> str:
        """A hash of everything that the requests depend on."""
        return hash_facts(
            [self.seed, self.temperature, [r.tokens for r in (*self.given, *self.own)]]
        )

    def list_wave(self, number: int) -> list[HeadRequest]:
        """Return the requests of a wave, from 0; none: there are no more."""
        n_given = n_own = n_written = 0
        most = USER_SHARE if self.is_endless and self.own else WAVE
        for _ in range(number + 1):
            given = self.given[n_given : n_given + most]
            n_rest = WAVE - len(given) if self.is_endless else 0
            own = self.own[n_own : n_own + (n_rest + 1) // 2]
            begin, n_new = n_written, n_rest - len(own)
            n_given, n_own, n_written = n_given + len(given), n_own + len(own), begin + n_new
        requests = [*given, *own]
        if n_new:
            write = self._write_requests if self.writes_requests else self._begin_texts
            requests += write(begin, n_new)
        random.Random(self.seed + number).shuffle(requests)
        return requests

    def _settings(self, max_new_tokens: int, sampling: SamplingParams) -> TextSettings:
        if self.temperature:
            sampling = SamplingParams(self.temperature)
        return TextSettings(max_new_tokens, "loop", sampling, self.seed)

    def _list_prompts(self, task: Task) -> list[HeadRequest]:
        workload = make_workload(self.model, task, task.trainable)
        self._openings += [
            " ".join(prompt.text.split(" ")[:OPENING_WORDS])
            for prompt in task.trainable
            if not self._is_rendered(prompt.text)
        ]
        settings = replace(
            self._settings(workload.max_new_tokens, workload.sampling),
            end_on_repeat=workload.end_on_repeat,
            constraint=workload.constraint,
        )
        return [HeadRequest(prompt, settings) for prompt in workload.prompt_ids]

    def _is_chat(self, path: Path) -> bool:
        """Return whether the prompts of a file are requests that no template has rendered yet."""
        return get_chat_template(self.model.tokenizer) is not None and not any(
            self._is_rendered(prompt.text) for prompt in load_task(path).calibration
        )

    def _is_rendered(self, text: str) -> bool:
        """Return whether a text has special tokens, which a template has written."""
        special = getattr(self.model.tokenizer, "all_special_tokens", ())
        return any(token in text for token in special)

    def _read_text(self, path: Path, task: Task | None, self_generated: bool) -> list[HeadRequest]:
        texts, spec = list(read_documents(path)), self.model.spec
        if task is not None:
            refuse_holdout(task, texts)
        length = min(WINDOW_TOKENS, (spec.context_length or 2 * WINDOW_TOKENS) // 2)
        if not self_generated:
            windows = token_windows(self.model.tokenizer, texts, length, spec.eos_token_ids)
            return [HeadRequest(tuple(window), None) for window in windows.tolist()]
        longest = BEGINNING_SHARE * length // 4
        settings = self._settings(length, SamplingParams())
        beginnings = list_beginnings(self.model.tokenizer, texts, longest, length)
        return [HeadRequest(tuple(tokens), settings) for tokens in beginnings]

    def _begin_texts(self, first: int, count: int) -> list[HeadRequest]:
        """Return the beginnings of texts that a model without a chat template writes."""
        start = self.model.spec.eos_token_ids[:1] or (0,)
        context = self.model.spec.context_length or WINDOW_TOKENS
        settings = self._settings(min(WINDOW_TOKENS, context // 2), SamplingParams(1.0))
        seeds = range(self.seed + first, self.seed + first + count)
        return [HeadRequest(start, replace(settings, seed=seed)) for seed in seeds]

    def _write_requests(self, first: int, count: int) -> list[HeadRequest]:
        """Return requests that the model writes where the chat template expects the user's."""
        model, tokenizer = self.model, self.model.tokenizer
        beginning = render_user_turn(tokenizer, MARK).partition(MARK)[0]
        if not encode_text(tokenizer, beginning, special=False):
            return []
        openings = [
            self._openings[i // 2 % len(self._openings)] if i % 2 else ""
            for i in range(first, first + count)
        ]
        prompts = [encode_text(tokenizer, beginning + text, special=False) for text in openings]
        drawn = TextSettings(REQUEST_TOKENS, "loop", SamplingParams(1.0), self.seed + first)
        written = write_reference_text(
            model, prompts, drawn, store=TextStore.open_for(model, drawn)
        )
        settings = self._settings(load_task(OWN_TASK).max_new_tokens, SamplingParams())
        requests = list[HeadRequest]()
        for opening, text in zip(openings, written, strict=True):
            if text.tokens[-1] not in model.spec.eos_token_ids:
                continue  # it did not end, or loops
            ending = tokenizer.decode(text.tokens, skip_special_tokens=True)
            request = (opening + ending).strip()
            if request:
                tokens = encode_prompt(tokenizer, request, chat=True)
                requests.append(HeadRequest(tuple(tokens), settings))
        return requests


def collect_text(
    model: ModelAdapter,
    requests: HeadRequests,
    file: FeatureFile,
    top_k: int,
    limits: TextLimits,
    licence: str,
    on_event: Callable[[StageStarted | StageProgress], None],
    is_complete: bool = False,
) -> Corpus:
    """Add texts to a file until there are enough, and return the windows of all its texts.

    The texts that the file has already are not written again. is_complete: a training has begun
    with them, so none is added. Raises: ModuleError if there are fewer than two texts.
    """
    wave, n_idle = file.texts[-1].wave if file.texts else 0, 0
    known = {tuple(text.tokens) for text in file.texts}
    on_event(StageStarted(f"{model.spec.id} answers requests and reads them"))
    while not is_complete and (limits.share_done(file) < 1 or len(file.texts) < 2):
        started = perf_counter()
        wanted = requests.list_wave(wave)
        if not wanted:
            break
        n_before = len(file.texts)
        for text in _answer(model, wanted):
            tokens = text.tokens
            if tuple(tokens) in known:
                continue
            features = compute_features(model, tokens, top_k, text.states)
            # The first text of a group has the time in which all of them were written.
            seconds, started = perf_counter() - started, perf_counter()
            file.add(StoredText(tokens, text.n_prompt, seconds, wave), features)
            known.add(tuple(tokens))
            share = limits.share_done(file)
            on_event(StageProgress(min(1000, int(1000 * share)), 1000))
            if share >= 1 and len(file.texts) > 1:
                break
        n_idle = 0 if len(file.texts) > n_before else n_idle + 1
        if n_idle == MAX_IDLE_WAVES:
            break
        wave += 1
    n_texts = len(file.texts)
    if n_texts < 2:
        raise ModuleError(
            f"there are {n_texts} texts to train on, and one is kept aside: give more of it, or a "
            "longer --budget"
        )
    aside = range(1, n_texts, VALIDATION_ONE_IN)[:MAX_VALIDATION_TEXTS]
    longest = max(len(text.tokens) for text in file.texts)
    length = PACKED_TOKENS if n_texts > FEW_TEXTS else min(PACKED_TOKENS, longest)
    return Corpus(
        file.pack_windows([i for i in range(n_texts) if i not in aside], length),
        file.pack_windows(aside, length),
        requests.description,
        licence,
        file,
    )


def _answer(model: ModelAdapter, requests: Sequence[HeadRequest]) -> Iterator[AnsweredText]:
    """Yield the texts of requests, without what follows once an answer repeats itself.

    They are written a group at a time, so that a budget ends between two groups. A group is what
    `write_reference_text` writes in one pass.
    """
    for request in requests:
        if request.settings is None:
            yield AnsweredText(list(request.tokens), 0)
    pairs = [(r.settings, r.tokens) for r in requests if r.settings is not None]
    for settings, prompts in _group_by_length(pairs):
        store = TextStore.open_for(model, settings)
        answers = write_reference_text(model, prompts, settings, store=store, keep_states=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = answer.tokens[: find_loop_start(answer.tokens)]
            if len(tokens) >= MIN_ANSWER_TOKENS:
                yield AnsweredText([*prompt, *tokens], len(prompt), answer.states)


def _group_by_length(
    pairs: Sequence[tuple[TextSettings, Sequence[int]]],
) -> list[tuple[TextSettings, list[Sequence[int]]]]:
    """Return groups of prompts that are answered in one pass: it pads them to the longest."""
    groups = list[tuple[TextSettings, list[Sequence[int]]]]()
    for settings, prompt in sorted(pairs, key=lambda pair: (repr(pair[0]), len(pair[1]))):
        if groups and settings == groups[-1][0]:
            shortest = len(groups[-1][1][0])
            is_similar = len(prompt) <= 2 * shortest + MIN_GROUP_SPREAD
            if is_similar and len(groups[-1][1]) < MIN_TEXTS:
                groups[-1][1].append(prompt)
                continue
        groups.append((settings, [prompt]))
    return groups
