"""A constraint that begins after the thinking, as one grammar: free text, its end, the answer.

So the matcher rolls back over the end of the thinking as over any other text, and nothing else has
to know where it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any

from llguidance import LLTokenizer

from skipsearch.core.constraint import ConstraintAfterThinking


def begin_after_thinking(
    grammar: str,
    constraint: ConstraintAfterThinking,
    tokenizer: Any,
    prepared: LLTokenizer,
    eos_ids: Collection[int],
) -> str:
    """Return the grammar of a whole text, from the library's grammar of its answer.

    In the thinking every token is legal but those that end the text. The library treats some added
    tokens as tokens without a text, so that a mark is named by its id, too.
    """
    ids = {
        text: i for text, i in tokenizer.get_added_vocab().items() if prepared.is_special_token(i)
    }
    end_id = ids.get(constraint.end)
    others = [i for i in ids.values() if i not in eos_ids and i != end_id]
    thought = f"{'(TEXT other)*' if others else ''} (end {'' if end_id is None else '| TEXT mark'})"
    thought += f" SPACE {_quote(constraint.between, ids)}"
    if constraint.begin is not None:
        begin = f"({json.dumps(constraint.begin)} | {_quote(constraint.begin, ids)})"
        thought = f"({begin} {thought})?"
    start = f"{thought} {_quote(constraint.head, ids)} @answer"
    rules = [
        f"start: {start}",
        f"end[lazy]: TEXT {json.dumps(constraint.end)}",
        "TEXT: /(.|\\n)*/",
        "SPACE: /[ \\t\\r\\n]{0,4}/",
        *([] if end_id is None else [f"mark: <[{end_id}]>"]),
        *([f"other: <[{_write_ranges(others)}]>"] if others else []),
    ]
    answer = (
        json.loads(grammar)["grammars"][0]
        if grammar.lstrip().startswith("{")
        else {"lark_grammar": grammar}
    )
    whole = {"lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [whole, {**answer, "name": "answer"}]})


def _quote(text: str, ids: Mapping[str, int]) -> str:
    """Return a text as a grammar names it: added tokens by their ids, the rest in quotes."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in filter(None, parts)
    )


def _write_ranges(ids: Iterable[int]) -> str:
    """Return ids as the library writes them, such as `3-5,9`."""
    runs = [
        [i for _, i in run]
        for _, run in groupby(enumerate(sorted(ids)), lambda entry: entry[1] - entry[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
