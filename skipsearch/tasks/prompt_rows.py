"""From rows to prompts: the template for a row, and the worked examples (shots) before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import Manifest
from skipsearch.tasks.prompt_template import fill_template, list_columns
from skipsearch.tasks.rows import Row, take_first_turn
from skipsearch.tasks.split import stable_key
from skipsearch.tasks.task import Prompt

# The shapes of a line that no manifest describes: its columns and their template, as text to
# continue and as a request to a chat model. The first shape that fits is used.
ROW_SHAPES = {
    # our own, HumanEval, and the first turn of Spec-Bench and of conversations
    ("prompt",): ("{prompt}", "{prompt}"),
    ("article", "highlights"): ("Article: {article}\nSummary:", "Summarize:\n{article}"),  # CNN/DM
    ("instruction", "input"): ("{instruction}\n\n{input}", "{instruction}\n\n{input}"),  # Alpaca
    ("instruction",): ("{instruction}", "{instruction}"),
    ("question",): ("Question: {question}\nAnswer:", "{question}"),  # GSM8K
    ("problem",): ("Problem: {problem}\nSolution:", "{problem}"),  # MATH
    ("text",): ("{text}", "{text}"),
}
USER_ROLES = ("user", "human")  # of the turns of OpenAI's `messages` and ShareGPT's `conversations`


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
    columns = _take_first_request(row)
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
    turns = next(
        (name for name in ("turns", "messages", "conversations") if name in row.columns), ""
    )
    if turns and "prompt" not in row.columns:
        return f"the first user turn of {turns}"
    return ", ".join(_find_shape(row.columns) or ())


def _find_shape(columns: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the columns of the first shape whose columns are there and not blank."""
    fitting = [needed for needed in ROW_SHAPES if all(name in columns for name in needed)]
    filled = (n for n in fitting if all(columns[name] not in (None, "") for name in n))
    return next(filled, fitting[0] if fitting else None)


def _take_first_request(row: Row) -> Mapping[str, Any]:
    """Return the columns with the first turn of the user as `prompt`, where there are turns.

    Later turns need the model's own answers. Raises: TaskError for a conversation without a user.
    """
    columns = take_first_turn(row.columns)
    turns = columns.get("messages", columns.get("conversations"))
    if "prompt" in columns or turns is None:
        return columns
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in USER_ROLES:
            return {**columns, "prompt": turn.get("content", turn.get("value"))}
    raise TaskError(
        f"{row.location}: its conversation has no turn of a user; a turn is "
        '{"role": "user", "content": "…"} or {"from": "human", "value": "…"}'
    )


def parse_messages(row: Row) -> list[dict[str, str]] | None:
    """Return the messages of a line with `messages`, as chat clients write them; None for any other
    line.

    Raises: TaskError.
    """
    if "messages" not in row.columns:
        return None
    turns = row.columns["messages"]
    if (
        not isinstance(turns, list)
        or not turns
        or not all(
            isinstance(turn, dict)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in turns
        )
    ):
        raise TaskError(
            f"{row.location}: messages is {str(turns)[:60]!r}; it is a list of turns such as "
            '{"role": "user", "content": "…"}'
        )
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def render_row(row: Row, manifest: Manifest) -> RenderedRow:
    """Render a row with the manifest's template.

    A row without the template's columns is used as it is if it has a prompt of its own.
    Spec-Bench's lines have one, so they can be given to any task.

    Raises: TaskError that names the row and the column.
    """
    missing = [name for name in list_columns(manifest.template) if name not in row.columns]
    if missing and "prompt" not in row.columns:
        raise TaskError(
            f"{row.location}: there is no column {missing[0]!r}, which task {manifest.name} needs; "
            f"its columns are {_format_columns(row.columns)}"
        )
    template = "{prompt}" if missing else manifest.template
    text = _render_template(row, template, row.columns)
    return RenderedRow(
        row,
        strip_final_newline(Prompt(row.id, text, _read_category(row))),
        is_complete=bool(missing),
    )


def strip_final_newline(prompt: Prompt) -> Prompt:
    """Remove line breaks from the end of a prompt.

    Many tokenizers join a line break with the indentation after it. A model has therefore hardly
    seen a line break alone, except at the end of a file. After a prompt that ends in one, it would
    end the text at once. All of HumanEval's prompts end in a line break.
    """
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
        text = fill_template(template, columns)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{row.location}: the text holds half of a surrogate pair, which is no character; mend "
            "the data"
        ) from error
    except ValueError as error:
        raise TaskError(f"{row.location}: {error}") from error
    if not text.strip():
        raise TaskError(
            f"{row.location}: the prompt is empty; a prompt has at least one visible character"
        )
    return text


def _format_columns(columns: Mapping[str, Any]) -> str:
    return ", ".join(map(str, columns)) or "none"
