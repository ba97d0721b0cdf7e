"""Score a text against a task's target: exact match, ROUGE, or whether a program passes its tests.

A task names its metric in task.yaml, under `score`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from skipsearch.bench.generated_code import passes_tests
from skipsearch.errors import DecodeError
from skipsearch.tasks import Task

# (prompt, answer, target) -> scores by name, each from 0 to 1
Scorer = Callable[[str, str, str], Mapping[str, float]]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FINAL_ANSWER = "####"  # GSM8K writes its result after this mark
ROUGE_NAMES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def make_scorer(task: Task, run_generated_code: bool = False) -> Scorer:
    """Return the scorer of a task's metric.

    run_generated_code: the user allows programs that a model wrote to run here.

    Raises: DecodeError if the task has no metric, if a package is missing, or if the metric runs
        programs and the user did not allow it.
    """
    if task.score is None:
        raise DecodeError(
            f"task {task.name} has no score, so its answers cannot be judged: use gsm8k, cnndm, "
            "xsum or humaneval, or add `score` to its task.yaml"
        )
    match task.score.metric:
        case "exact_match":
            return score_exact_match
        case "rouge":
            return _make_rouge_scorer()
        case "pass@1":
            if not run_generated_code:
                raise DecodeError(
                    f"task {task.name} is scored by running the programs that the model writes; "
                    "add --run-generated-code to allow it (best in a container)"
                )
            return score_program


def score_exact_match(prompt: str, answer: str, target: str) -> Mapping[str, float]:
    """Compare the final number of an answer with that of the target.

    Source: Cobbe et al. 2021; the last number counts if there is no `####`, as in
    lm-evaluation-harness (`flexible-extract`).
    """
    expected = find_final_number(target)
    return {"exact match": float(expected is not None and find_final_number(answer) == expected)}


def find_final_number(text: str) -> Decimal | None:
    """Return the number after the last `####`, or else the last number; None without a number."""
    _, mark, result = text.rpartition(FINAL_ANSWER)
    if mark and (number := NUMBER.search(result)):
        return Decimal(number[0].replace(",", ""))
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _make_rouge_scorer() -> Scorer:
    """Return a scorer of ROUGE F1. Raises: DecodeError if `rouge-score` is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise DecodeError(
            "ROUGE needs the package rouge-score: pip install 'skipsearch[scores]'"
        ) from None
    rouge = RougeScorer(list(ROUGE_NAMES), use_stemmer=True)

    def score_summary(prompt: str, answer: str, target: str) -> Mapping[str, float]:
        scores = rouge.score(target, answer)
        return {name: scores[key].fmeasure for key, name in ROUGE_NAMES.items()}

    return score_summary


def score_program(prompt: str, answer: str, target: str) -> Mapping[str, float]:
    """Run a program with its tests. Source: Chen et al. 2021 (HumanEval), section 2.1.

    prompt: the beginning of the program. target: its tests.
    """
    return {"pass@1": float(passes_tests(f"{prompt}{answer}\n{target}\n"))}


def cut_answer(text: str, until: Sequence[str]) -> str:
    """Return the text before the first of the strings `until`."""
    return text[: min((at for end in until if (at := text.find(end)) >= 0), default=None)]
