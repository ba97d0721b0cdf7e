"""The schema of `calibration_data/<task>/task.yaml` and its reader.

An error names the file, the line, the field and the rule.
"""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as shorten
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from skipsearch.core.constraint import Constraint
from skipsearch.core.registry import unknown_name
from skipsearch.core.strict_yaml import MAX_BYTES, Document, FileKind, read_yaml
from skipsearch.errors import TaskError
from skipsearch.tasks.prompt_template import Template, Text
from skipsearch.tasks.task import TaskSampling
from skipsearch.tasks.task_files import open_task_file

MANIFEST_NAME = "task.yaml"
TASK_DOCUMENT = FileKind(TaskError, "task manifest", "name")


Count = Annotated[int, Field(ge=1)]


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StdlibSource(_ManifestModel):
    """Text of the running interpreter's standard library; rows have the single column `text`.

    flavour: `code` (a source file up to a place inside a function) or `docstrings` (the first part
        of a long one).
    per_module: the most prompts of one module.
    docstring_least: characters of the shortest docstring that is used.
    """

    kind: Literal["stdlib"]
    flavour: Literal["code", "docstrings"]
    per_module: Count = 1
    docstring_least: Count = 600


class JsonlSource(_ManifestModel):
    """Lines of JSON in files next to the manifest.

    Without holdout_path, both splits come from one file.
    """

    kind: Literal["jsonl"]
    path: Text
    holdout_path: Text | None = None


def _check_file_name(file: str) -> str:
    if not file.endswith((".parquet", ".jsonl")):
        raise ValueError(
            f"{file} is neither .parquet nor .jsonl; name a file of one of these kinds"
        )
    return file


class HubSource(_ManifestModel):
    """Files of a dataset on the Hugging Face Hub at a revision.

    Without holdout_files, both splits come from one pool.
    """

    kind: Literal["hub"]
    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Text
    calibration_files: Annotated[
        list[Annotated[str, AfterValidator(_check_file_name)]], Field(min_length=1)
    ]
    holdout_files: (
        Annotated[list[Annotated[str, AfterValidator(_check_file_name)]], Field(min_length=1)]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_disjoint(self) -> Self:
        both = set(self.calibration_files) & set(self.holdout_files or ())
        if both:
            raise ValueError(
                f"{min(both)} is in both splits; leave holdout_files out to have one pool split"
            )
        return self


class Manifest(_ManifestModel):
    """One task as its file describes it.

    calibration, holdout: numbers of prompts; max_new_tokens, max_prompt_tokens: numbers of tokens.
    template: the prompt, with the columns of a row as placeholders.
    shots: number of worked examples before each prompt; shot: the template of one.
    columns: our name of a column -> the dataset's name.
    single_line: columns whose line breaks become spaces.
    constraint: the shape of the answers; None: any text.
    categories: rows with another value in the column `category` are not used; None: all are used.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    version: Count
    description: Text
    source: Annotated[StdlibSource | JsonlSource | HubSource, Field(discriminator="kind")]
    template: Template
    shot: Template | None = None
    shots: Annotated[int, Field(ge=0)] = 0
    columns: dict[str, Text] = {}
    single_line: list[Text] = []
    categories: list[Text] | None = None
    chat: bool = False
    max_new_tokens: Count
    max_prompt_tokens: Count
    sampling: TaskSampling
    calibration: Count
    holdout: Count
    seed: Annotated[int, Field(ge=0)]
    end_on_repeat: Count | Literal["loop"] | None
    constraint: Constraint | None = None

    @model_validator(mode="after")
    def _check_constraint(self) -> Self:
        if self.constraint is not None and self.sampling.temperature > 0:
            raise ValueError(
                "constraint: answers of a shape are decoded greedily; set the temperature to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_shots(self) -> Self:
        if (self.shots > 0) != (self.shot is not None):
            raise ValueError(
                "shots and shot belong together: how many examples, and the template of one"
            )
        return self


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in a file.

    Raises: TaskError that names the file, the line, the field and the broken rule.
    """
    with open_task_file(path) as file:
        try:
            content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise TaskError(f"{path}: cannot be read ({error.strerror or error})") from error
    document = read_yaml(content, str(path), TASK_DOCUMENT)
    if not isinstance(document.data, dict):
        raise TaskError(f"{path}: a task manifest is a mapping of fields such as name and source")
    try:
        return Manifest.model_validate(document.data)
    except ValidationError as error:
        raise TaskError(
            _explain_error(path, document, error.errors(include_url=False)[0])
        ) from error


def _explain_error(path: Path, document: Document, problem: ErrorDetails) -> str:
    """Return one sentence about the first error that pydantic found."""
    key_path = problem["loc"]
    line = document.line_of(key_path)
    # Pydantic puts the tag of a union into the path (`source.hub.repo`); the file has no such
    # level.
    field = (
        ".".join(str(part) for part in key_path if part not in ("stdlib", "jsonl", "hub"))
        or "the manifest"
    )
    return f"{path}{f', line {line}' if line else ''}: {_describe_rule(field, problem)}"


def _describe_rule(field: str, problem: ErrorDetails) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return unknown_name("field", str(problem["loc"][-1]), _sibling_fields(problem["loc"]))
    if kind == "union_tag_invalid":
        return unknown_name("source kind", str(problem["ctx"]["tag"]), ("stdlib", "jsonl", "hub"))
    if kind == "union_tag_not_found":
        return f"{field} has no kind; it is stdlib, jsonl or hub"
    if kind == "value_error":
        return f"{field}: {problem['msg'].removeprefix('Value error, ')}"
    shown = (
        shorten(value)
        if isinstance(value, str | int | float | bool | None)
        else f"a {type(value).__name__}"
    )
    return f"{field} is {shown}; {problem['msg'].replace('Input', 'it').replace('String', 'it')}"


def _sibling_fields(key_path: tuple[Any, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "stdlib": StdlibSource,
        "jsonl": JsonlSource,
        "hub": HubSource,
        "sampling": TaskSampling,
    }
    parent = str(key_path[-2]) if len(key_path) > 1 else ""
    return list(models.get(parent, Manifest).model_fields)
