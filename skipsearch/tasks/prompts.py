"""From rows to prompts: the template that fits a row, and the worked examples (shots) that stand before each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import Manifest
from skipsearch.tasks.rows import Row, with_first_turn
from skipsearch.tasks.split import rank
from skipsearch.tasks.template import columns_of, render
from skipsearch.tasks.values import Prompt

# What a line of a bare file may look like, the first that fits: its columns and how they become a prompt.
SHAPES = {
    ("prompt",): "{prompt}",                                       # ours, HumanEval, and Spec-Bench by its first turn
    ("question", "answer"): "Question: {question}\nAnswer:",       # GSM8K
    ("article", "highlights"): "Article: {article}\nSummary:",     # CNN/DM
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row and its prompt without shots. whole: the row was a prompt already, the manifest's template did not apply."""

    row: Row
    prompt: Prompt
    whole: bool


def bare_prompt(row: Row) -> Prompt:
    """The prompt of a line that no manifest describes. Raises: TaskError if its columns are of no known shape."""
    columns = with_first_turn(row.columns)
    for needed, template in SHAPES.items():
        if all(name in columns for name in needed):
            return Prompt(row.id, _text(row, template, columns), _category(row))
    known = ", ".join("{" + ", ".join(needed) + "}" for needed in SHAPES)
    raise TaskError(f"{row.where}: its columns ({_listed(columns)}) are of no known shape; a line has {known} or {{turns}}")


def conversation(row: Row) -> list[dict[str, str]] | None:
    """The turns of a line with `messages`, as chat clients write them; None for any other line. Raises: TaskError."""
    if "messages" not in row.columns:
        return None
    turns = row.columns["messages"]
    if not isinstance(turns, list) or not turns or not all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str) for turn in turns):
        raise TaskError(f"{row.where}: messages is {str(turns)[:60]!r}; it is a list of turns such as "
                        '{"role": "user", "content": "…"}')
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def rendered(row: Row, manifest: Manifest) -> Rendered:
    """A row by the manifest's template, or as it stands if it lacks the template's columns but is a prompt of its own:
    Spec-Bench's lines are such, whatever task they are given to. Raises: TaskError naming the row and the column.
    """
    missing = [name for name in columns_of(manifest.template) if name not in row.columns]
    if missing and "prompt" not in row.columns:
        raise TaskError(f"{row.where}: there is no column {missing[0]!r}, which task {manifest.name} needs; "
                        f"its columns are {_listed(row.columns)}")
    template = "{prompt}" if missing else manifest.template
    return Rendered(row, without_line_break(Prompt(row.id, _text(row, template, row.columns), _category(row))), whole=bool(missing))


def without_line_break(prompt: Prompt) -> Prompt:
    """A task's prompt ends on text: many tokenizers join a line break with the indentation behind it, so that a model has hardly
    seen one stand alone, other than at the end of a file, and ends there too. HumanEval's prompts all end in one.
    """
    return replace(prompt, text=prompt.text.rstrip("\r\n"))


def _category(row: Row) -> str:
    category = row.columns.get("category")
    return category if isinstance(category, str) else ""


def with_shots(front: Sequence[Rendered], back: Sequence[Rendered], manifest: Manifest) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of two pools behind the same examples, which come from the first pool and are prompts of neither."""
    distinct = {item.prompt.text: item for item in front if not item.whole}
    examples = sorted(distinct, key=lambda text: rank(manifest.seed, text))[:manifest.shots]
    shots = "".join(_text(distinct[text].row, manifest.shot or "", distinct[text].row.columns) for text in examples)

    def behind(items: Sequence[Rendered]) -> list[Prompt]:
        return [item.prompt if item.whole else replace(item.prompt, text=shots + item.prompt.text)
                for item in items if item.prompt.text not in examples]

    return behind(front), behind(back)


def _text(row: Row, template: str, columns: Mapping[str, Any]) -> str:
    try:
        text = render(template, columns)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(f"{row.where}: the text holds half of a surrogate pair, which is no character; mend the data") from error
    except ValueError as error:
        raise TaskError(f"{row.where}: {error}") from error
    if not text.strip():
        raise TaskError(f"{row.where}: the prompt is empty; a prompt has at least one visible character")
    return text


def _listed(columns: Mapping[str, Any]) -> str:
    return ", ".join(map(str, columns)) or "none"
