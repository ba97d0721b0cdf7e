"""From rows to prompts: the template for a row, and the worked examples (shots) before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.conversations import name_conversation, read_tools, read_turns, to_plain_text
from skipsearch.tasks.manifest import Manifest
from skipsearch.tasks.prompt_template import fill_template, list_columns
from skipsearch.tasks.rows import Row, take_first_turn
from skipsearch.tasks.split import stable_key
from skipsearch.tasks.task import Prompt

SERVED_COLUMN = "as_served"  # of a line of `serve --log-prompts`: true

# The shapes of a line that no manifest describes: its columns and their template, as text to
# continue and as a request to a chat model. The first shape that fits is used.
ROW_SHAPES = {
    # our own, HumanEval, and the first turn of Spec-Bench
    ("prompt",): ("{prompt}", "{prompt}"),
    ("article", "highlights"): ("Article: {article}\nSummary:", "Summarize:\n{article}"),  # CNN/DM
    ("instruction", "input"): ("{instruction}\n\n{input}", "{instruction}\n\n{input}"),  # Alpaca
    ("instruction",): ("{instruction}", "{instruction}"),
    ("question",): ("Question: {question}\nAnswer:", "{question}"),  # GSM8K
    ("problem",): ("Problem: {problem}\nSolution:", "{problem}"),  # MATH
    ("text",): ("{text}", "{text}"),
}


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row and its prompt without shots.

    is_complete: the row was a prompt already, so the manifest's template was not used.
    """

    row: Row
    prompt: Prompt
    is_complete: bool


def prompt_from_row(row: Row, chat: bool = False) -> Prompt:
    """Return the prompt of a line that no manifest describes.

    chat: as a request to a chat model, not as text to continue.
    Raises: TaskError if its columns have no known shape.
    """
    if name_conversation(row) is not None:
        turns, tools = read_turns(row), read_tools(row)
        is_request = not tools and [turn["role"] for turn in turns] == ["user"]  # as other rows
        text = _require_text(row, to_plain_text(turns))
        return Prompt(row.id, text, _read_category(row), *(() if is_request else (turns, tools)))
    columns = take_first_turn(row.columns)
    needed = _find_shape(columns)
    if needed is None:
        known = ", ".join("{" + ", ".join(needed) + "}" for needed in ROW_SHAPES)
        raise TaskError(
            f"{row.location}: its columns ({_format_columns(columns)}) are of no known shape; a "
            f"row has {known}, {{turns}}, {{messages}} or {{conversations}}"
        )
    text_template, chat_template = ROW_SHAPES[needed]
    template = chat_template if chat else text_template
    return Prompt(row.id, _render_template(row, template, columns), _read_category(row))


def name_read_columns(row: Row) -> str:
    """Return the names of the columns that `prompt_from_row` reads."""
    conversation = name_conversation(row)
    if conversation is not None:
        return f"{conversation}, without a final answer"
    if "turns" in row.columns and "prompt" not in row.columns:
        return "the first of turns"
    return ", ".join(_find_shape(row.columns) or ())


def _find_shape(columns: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the columns of the first shape whose columns are there and not blank."""
    fitting = [needed for needed in ROW_SHAPES if all(name in columns for name in needed)]
    filled = (n for n in fitting if all(columns[name] not in (None, "") for name in n))
    return next(filled, fitting[0] if fitting else None)


def render_row(row: Row, manifest: Manifest) -> RenderedRow:
    """Render a row with the manifest's template.

    A row without the template's columns is used as it is if it has a prompt or a conversation.
    Spec-Bench's lines have one, so they can be given to any task.

    Raises: TaskError that names the row and the column.
    """
    missing = [name for name in list_columns(manifest.template) if name not in row.columns]
    if missing and name_conversation(row) is None and "prompt" not in row.columns:
        raise TaskError(
            f"{row.location}: there is no column {missing[0]!r}, which task {manifest.name} needs; "
            f"its columns are {_format_columns(row.columns)}"
        )
    prompt = (
        prompt_from_row(row, manifest.chat)
        if missing
        else Prompt(
            row.id, _render_template(row, manifest.template, row.columns), _read_category(row)
        )
    )
    return RenderedRow(row, strip_final_newline(prompt, row), is_complete=bool(missing))


def strip_final_newline(prompt: Prompt, row: Row) -> Prompt:
    """Remove line breaks from the end of a row's prompt.

    Many tokenizers join a line break with the indentation after it. A model has therefore hardly
    seen a line break alone, except at the end of a file. After a prompt that ends in one, it would
    end the text at once. All of HumanEval's prompts end in a line break.
    A prompt that a server kept stays as it is, because many chat templates end in a line break.
    """
    if row.columns.get(SERVED_COLUMN) is True:
        return prompt
    return replace(prompt, text=prompt.text.rstrip("\r\n"))


def _read_category(row: Row) -> str:
    category = row.columns.get("category")
    return category if isinstance(category, str) else ""


def prepend_shots(
    calibration: Sequence[RenderedRow], holdout: Sequence[RenderedRow], manifest: Manifest
) -> tuple[list[Prompt], list[Prompt]]:
    """Put the same worked examples before the prompts of two pools.

    The examples are taken from the first pool, and their prompts are removed from both pools.
    Complete prompts get no examples.
    """
    distinct = {item.prompt.text: item for item in calibration if not item.is_complete}
    examples = sorted(distinct, key=lambda text: stable_key(manifest.seed, text))[: manifest.shots]
    shots = "".join(
        _render_template(distinct[text].row, manifest.shot or "", distinct[text].row.columns)
        for text in examples
    )

    def add_shots(items: Sequence[RenderedRow]) -> list[Prompt]:
        return [
            item.prompt if item.is_complete else replace(item.prompt, text=shots + item.prompt.text)
            for item in items
            if item.prompt.text not in examples
        ]

    return add_shots(calibration), add_shots(holdout)


def _render_template(row: Row, template: str, columns: Mapping[str, Any]) -> str:
    """Fill a template with the columns of a row. Raises: TaskError."""
    try:
        return _require_text(row, fill_template(template, columns))
    except ValueError as error:
        raise TaskError(f"{row.location}: {error}") from error


def _require_text(row: Row, text: str) -> str:
    """Return a prompt's text. Raises: TaskError for one that is empty or no Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{row.location}: the text holds half of a surrogate pair, which is no character; mend "
            "the data"
        ) from error
    if not text.strip():
        raise TaskError(
            f"{row.location}: the prompt is empty; a prompt has at least one visible character"
        )
    return text


def _format_columns(columns: Mapping[str, Any]) -> str:
    return ", ".join(map(str, columns)) or "none"
