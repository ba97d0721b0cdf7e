"""Score the answers of systems on a task's hold-out prompts: plain and drafted.

Drafts change no greedy text, and no distribution of sampled texts. The table shows what that means
for the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from skipsearch.bench.scoring import cut_answer, make_scorer
from skipsearch.bench.systems import SkipsearchSystem
from skipsearch.core.stats import Estimate, bootstrap_ratio
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.errors import DecodeError
from skipsearch.replay.workload import Workload, make_workload
from skipsearch.tasks import Task

DEFAULT_SAMPLING = SamplingParams(temperature=0.6, top_p=0.95)  # of a task that is greedy


@dataclass(frozen=True)
class ScoreRow:
    """The score of one system with one way to sample.

    score: mean over prompts, with its 95 % interval.
    identical: number of prompts whose text equals that of the first system; None if sampled.
    samples: answers to each prompt.
    """

    system: str
    sampling: str
    metric: str
    score: Estimate
    prompts: int
    samples: int
    identical: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_systems(
    systems: Sequence[SkipsearchSystem],
    task: Task,
    n_prompts: int | None = None,
    samples: int = 3,
    run_generated_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ScoreRow]:
    """Answer hold-out prompts with every system, greedily and with samples, and score the answers.

    n_prompts: the number of prompts, the first hold-out prompts that have a target; None: all that
        have one.
    samples: answers to each prompt with the task's own temperature, or 0.6 if it is greedy.

    Raises: DecodeError if the task has no score or no prompt with a target; see also `make_scorer`.
    """
    scorer = make_scorer(task, run_generated_code)
    assert task.score is not None
    scored = [prompt for prompt in task.holdout if prompt.target][:n_prompts]
    if not scored:
        raise DecodeError(
            f"no hold-out prompt of task {task.name} has what its score needs "
            f"({task.score.target}): give --data with rows that have it"
        )
    workload = make_workload(systems[0].model, task, scored)
    tokenizer, by_id = systems[0].model.tokenizer, {prompt.id: prompt for prompt in scored}
    sampled = workload.sampling if workload.sampling.temperature > 0 else DEFAULT_SAMPLING
    settings = ((GREEDY, 1), (sampled, samples))
    total = len(systems) * len(workload.prompt_ids) * (1 + samples)
    done, rows = 0, list[ScoreRow]()
    for sampling, count in settings:
        used = replace(workload, sampling=sampling)
        first_texts: list[list[str]] = []
        for system in systems:
            texts, scores = list[list[str]](), list[dict[str, float]]()
            for i, name in enumerate(workload.prompt_names):
                prompt = by_id[name]
                texts.append(
                    [_write_answer(system, used, i, seed, tokenizer) for seed in range(count)]
                )
                answers = [cut_answer(text, task.score.until) for text in texts[-1]]
                per_answer = [scorer(prompt.text, text, prompt.target) for text in answers]
                scores.append({key: fmean(s[key] for s in per_answer) for key in per_answer[0]})
                progress(done := done + count, total)
            first_texts = first_texts or texts
            same = sum(a == b for a, b in zip(texts, first_texts, strict=True))
            rows += [
                ScoreRow(
                    system.name,
                    _describe_sampling(sampling),
                    metric,
                    bootstrap_ratio([s[metric] for s in scores], [1.0] * len(scores)),
                    len(scores),
                    count,
                    same if sampling is GREEDY else None,
                )
                for metric in scores[0]
            ]
    return rows


def _write_answer(
    system: SkipsearchSystem, workload: Workload, prompt_index: int, seed: int, tokenizer: Any
) -> str:
    tokens = workload.generate(system.decoder, prompt_index, seed).tokens
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _describe_sampling(sampling: SamplingParams) -> str:
    if sampling.temperature == 0:
        return "greedy"
    top_p = f", top_p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature:g}{top_p}"
