"""Any settings that a drafter or an exit policy can have, drawn from its own JSON Schema: a field
added to one is drawn too.
"""

from __future__ import annotations

from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from skipsearch.core.reading import Vocabulary
from skipsearch.core.registry import resolve_name
from skipsearch.drafters.s3d.spec import DraftTree as TreeOfRanks
from skipsearch.drafters.swift.spec import SiblingSchedule as TreeOfWidths
from skipsearch.errors import SkipSearchError

MOST_LAYERS = 1024  # the schema's own bound of a layer's number, plus one
Values = st.SearchStrategy[Any]


@st.composite
def specs(draw: st.DrawFn, table: dict[str, str], kind: str, n_layers: int = MOST_LAYERS) -> Any:
    """A valid spec of one kind of `recipe.DRAFTERS` or `recipe.EXITS`, for a model of
    `n_layers`.
    """
    adapter = TypeAdapter[Any](resolve_name("kind", kind, table, SkipSearchError))
    schema = adapter.json_schema()
    data = draw(_values(schema, schema.get("$defs", {}), n_layers))
    try:
        return adapter.validate_python(data)
    except ValidationError:  # a rule between fields
        reject()


def _values(schema: dict[str, Any], definitions: dict[str, Any], n_layers: int) -> Values:
    """What pydantic takes for a schema, in Python: tuples for arrays, since a strict model takes no
    list for one.
    """

    def of(part: dict[str, Any]) -> Values:
        return _values(part, definitions, n_layers)

    if "$ref" in schema:
        part = definitions[schema["$ref"].rpartition("/")[2]]
        fields = frozenset(part["properties"])
        return _OBJECTS[fields] if fields in _OBJECTS else of(part)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return st.one_of([of(part) for part in schema[choice]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema["type"]:
        case "object":
            return st.fixed_dictionaries(
                {key: of(part) for key, part in schema["properties"].items()}
            )
        case "array":
            return st.lists(
                of(schema["items"]),
                min_size=schema.get("minItems", 0),
                max_size=schema.get("maxItems", 8),
                unique=True,
            ).map(tuple)
        case "integer":
            return st.integers(low, max(low, n_layers - 1) if high == MOST_LAYERS - 1 else high)
        case "number":
            return st.floats(low, high)
        case "string":
            return st.from_regex(schema.get("pattern", "[a-z]{1,9}"), fullmatch=True)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case other:
            raise NotImplementedError(other)


@st.composite
def _tree_of_ranks(draw: st.DrawFn) -> TreeOfRanks:
    trunk = draw(st.integers(1, 12))
    parents, ranks, children = list(range(trunk)), [0] * trunk, [1] * trunk + [0]
    for parent in draw(st.lists(st.integers(0, trunk - 1), max_size=20)):
        if children[parent] < 5:
            parents.append(parent)
            ranks.append(children[parent])
            children[parent] += 1
    return TreeOfRanks(parents=tuple(parents), ranks=tuple(ranks))


@st.composite
def _tree_of_widths(draw: st.DrawFn) -> TreeOfWidths:
    thresholds = sorted(draw(st.sets(st.floats(0, 1), min_size=1, max_size=8)), reverse=True)
    widths = draw(
        st.lists(st.integers(1, 16), min_size=len(thresholds) + 1, max_size=len(thresholds) + 1)
    )
    return TreeOfWidths(thresholds=tuple(thresholds), widths=tuple(widths))


# By their fields: two classes of one name. Chance would hardly ever meet the rules between these.
_OBJECTS: dict[frozenset[str], Values] = {
    frozenset(Vocabulary.model_fields): st.builds(
        lambda tokens, lowest: Vocabulary.from_ids(tokens, lowest).model_dump(),
        st.sets(st.integers(0, 300_000), max_size=20),
        st.integers(0, 2**20),
    ),
    frozenset(TreeOfRanks.model_fields): _tree_of_ranks(),
    frozenset(TreeOfWidths.model_fields): _tree_of_widths(),
}
