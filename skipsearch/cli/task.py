"""`skipsearch task`: show the prompts of a task, and check tasks before they are shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skipsearch.cli.consoles import err, out, print_json
from skipsearch.errors import TaskError

if TYPE_CHECKING:
    from skipsearch.tasks import Task

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Example: skipsearch task show pycode --model demo\n\nLook at tasks and check them.",
)


@app.command(short_help="Three prompts of a task, and its sizes.")
def show(
    task: Annotated[
        str, typer.Argument(help="A task's name, a folder with a task.yaml, or a .jsonl file.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file to take the text from instead of the task's source."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Show the prompts as this model is given them, and count its tokens."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Example: skipsearch task show pycode --model demo

    Show three rendered prompts of a task, its sizes and the hashes of its text.
    """
    from skipsearch.tasks import load_task

    loaded = load_task(task, data=data, chat=chat)
    prompts: list[dict[str, Any]] = [
        {"id": prompt.id, "text": prompt.text} for prompt in loaded.calibration[:3]
    ]
    facts = {
        "task": loaded.name,
        "version": loaded.version,
        "description": loaded.description,
        "max_new_tokens": loaded.max_new_tokens,
        "max_prompt_tokens": loaded.max_prompt_tokens,
        "sampling": loaded.sampling.model_dump(),
        "end_on_repeat": loaded.end_on_repeat,
        "chat": loaded.chat,
        "seed": loaded.seed,
        "calibration": len(loaded.calibration),
        "holdout": len(loaded.holdout),
        "characters": _size_spread(
            len(prompt.text) for prompt in loaded.calibration + loaded.holdout
        ),
        "calibration_sha256": loaded.calibration_sha256,
        "holdout_sha256": loaded.holdout_sha256,
        "notes": list(loaded.notes),
    }
    if model is not None:
        prompts, more = _tokenize_for_model(model, loaded, len(prompts))
        facts |= more
    if as_json:
        print_json(facts | {"prompts": prompts})
        return
    for prompt in prompts:
        tokens = f", {prompt['tokens']} tokens" if "tokens" in prompt else ""
        out.rule(f"{prompt['id']}{tokens}", align="left")
        out.print_block(prompt["text"])
    out.rule()
    for name, value in facts.items():
        out.print(f"{name}: {_format_value(value)}")


def _tokenize_for_model(
    model: str, task: Task, n_shown: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (the first prompts as the model gets them, facts about the task with this model).

    The facts are the model's chat template, numbers of tokens, and how many prompts are too long.
    """
    from skipsearch.models import load_tokenizer
    from skipsearch.replay.workload import (
        encode_task_prompt,
        render_prompt,
        template_sha256,
        token_limits,
    )

    tokenizer, context = load_tokenizer(model)
    max_prompt_tokens, max_new_tokens = token_limits(task, context)
    template = template_sha256(task, tokenizer)
    counts = [
        len(encode_task_prompt(task, tokenizer, prompt))
        for prompt in task.calibration + task.holdout
    ]
    prompts = [
        {"id": prompt.id, "text": render_prompt(task, tokenizer, prompt), "tokens": count}
        for prompt, count in zip(task.calibration[:n_shown], counts, strict=False)
    ]
    return prompts, {
        "model": model,
        "chat_template_sha256": template,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "tokens": _size_spread(counts),
        "too_long": sum(count > max_prompt_tokens for count in counts),
    }


def _size_spread(sizes: Iterable[int]) -> dict[str, int]:
    """Return the least, the median and the greatest of these sizes."""
    ordered = sorted(sizes)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return "; ".join(value) if isinstance(value, list) else "none" if value is None else str(value)


@app.command(short_help="Check tasks before sharing them.")
def validate(
    path: Annotated[
        Path,
        typer.Argument(help="A task.yaml, a task's folder, a folder of tasks, or a .jsonl file."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a task.")] = False,
) -> None:
    """Example: skipsearch task validate calibration_data

    Check tasks before sharing them; text on the Hub is not downloaded.
    """
    from skipsearch.tasks.check_task import check_tasks

    results = check_tasks(path)
    for result in results:
        if as_json:
            print_json(asdict(result))
        elif result.problem is None:
            out.print(f"ok  {result.summary}")
        elif len(results) > 1:
            err.print(f"bad {result.problem}")
    problems = [result.problem for result in results if result.problem is not None]
    if problems:
        raise TaskError(
            problems[0]
            if len(results) == 1
            else f"{len(problems)} of {len(results)} tasks in {path} are not valid"
        )
