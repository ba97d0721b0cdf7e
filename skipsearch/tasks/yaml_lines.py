"""Strict YAML for manifests: plain data, no key twice, no alias, and the line that each field stands on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from skipsearch.errors import TaskError
from skipsearch.tasks.files import open_regular

MAX_BYTES = 64 * 1024  # a manifest is a page; anything larger is another file, or an attack


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias; a manifest spells everything out", problem_mark=mark)
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> tuple[Any, yaml.Node | None]:
    """The data of a YAML file and the node tree that knows its lines.

    Raises: TaskError naming the file and, where there is one, the line.
    """
    with open_regular(path) as file:
        try:
            raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise TaskError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) > MAX_BYTES:
        raise TaskError(f"{path}: larger than a page; a task manifest has at most {MAX_BYTES} bytes")
    try:
        loader = _Loader(raw.decode("utf-8"))
        node = loader.get_single_node()
        _refuse_repeated_keys(node)
        return (None if node is None else loader.construct_document(node)), node
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise TaskError(f"{path}{line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        raise TaskError(f"{path}: not readable as YAML ({reason})") from error


def line_of(node: yaml.Node | None, where: Sequence[str | int]) -> int | None:
    """The line of the deepest part of `where` that the file has; parts that it lacks (a union's tag) are passed over."""
    line = None
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == part), None)
            if found:
                line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _refuse_repeated_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands here twice; keep one", problem_mark=key.start_mark)
            seen.add(key.value)
            _refuse_repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item)
