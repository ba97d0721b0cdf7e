"""`skipsearch task`: look at a task's prompts, and check tasks before they are shared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from skipsearch.cli.common import err, out, print_json
from skipsearch.errors import TaskError

app = typer.Typer(no_args_is_help=True, help="Look at tasks and check them.")


@app.command()
def show(
    task: Annotated[str, typer.Argument(help="A task's name, a folder with a task.yaml, or a .jsonl file.")],
    data: Annotated[Path | None, typer.Option(help="A .jsonl file to take the text from instead of the task's source.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Three rendered prompts of a task, its sizes and the hashes of its text.

    Example: skipsearch task show pycode
    """
    from skipsearch.tasks import load_task

    loaded = load_task(task, data=data)
    lengths = sorted(len(prompt.text) for prompt in loaded.calibration + loaded.holdout)
    facts = {
        "task": loaded.name, "version": loaded.version, "description": loaded.description,
        "max_new_tokens": loaded.max_new_tokens, "max_prompt_tokens": loaded.max_prompt_tokens,
        "sampling": loaded.sampling.model_dump(), "end_on_repeat": loaded.end_on_repeat, "chat": loaded.chat, "seed": loaded.seed,
        "calibration": len(loaded.calibration), "holdout": len(loaded.holdout),
        "characters": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]},
        "calibration_sha256": loaded.calibration_sha256, "holdout_sha256": loaded.holdout_sha256, "notes": list(loaded.notes),
    }
    if as_json:
        print_json(facts | {"prompts": [{"id": prompt.id, "text": prompt.text} for prompt in loaded.calibration[:3]]})
        return
    for prompt in loaded.calibration[:3]:
        out.rule(Text(prompt.id), align="left")  # as text: an id may hold brackets
        out.print(prompt.text, markup=False)
    out.rule()
    for name, value in facts.items():
        out.print(f"{name}: {value}", markup=False)


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(help="A task.yaml, a task's folder, a folder of tasks, or a .jsonl file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a task.")] = False,
) -> None:
    """Check tasks before sharing them; text on the Hub is not downloaded.

    Example: skipsearch task validate calibration_data
    """
    from skipsearch.tasks.check import check

    results = check(path)
    for result in results:
        if as_json:
            print_json(asdict(result))
        elif result.problem is None:
            out.print(f"ok  {result.summary}", markup=False)
        elif len(results) > 1:
            err.print(f"bad {result.problem}", markup=False)
    problems = [result.problem for result in results if result.problem is not None]
    if problems:
        raise TaskError(problems[0] if len(results) == 1 else f"{len(problems)} of {len(results)} tasks in {path} are not valid")
