"""The tables of the documents that are made from the code.

A document marks the place of a table with `<!-- name -->` and `<!-- /name -->`. Run as a program,
this rewrites them all, and draws the pictures:

    make tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from skipsearch.bench.method_table import MethodRow, to_markdown
from skipsearch.cli.list_command import list_entries

from . import reference, results

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"<!-- (?P<name>[a-z0-9-]+) -->\n(?P<text>.*?)<!-- /(?P=name) -->", re.DOTALL)


def listed(what: str) -> Callable[[], str]:
    """As `skipsearch list` prints it."""
    return lambda: table(what.removesuffix("s"), "what it does", list_entries(what))


def commands() -> str:
    """The commands and the first sentence that each says of itself."""
    from typer.main import get_command

    from skipsearch.cli.main import app, register

    if not app.registered_commands:
        register()
    found = {
        f"skipsearch {name}": command.get_short_help_str(200).removesuffix(".")
        for name, command in get_command(app).commands.items()
    }  # type: ignore[attr-defined]
    return table("command", "what it does", found)


# Why architectures that transformers has a decoder class for have no row.
WITHOUT_ROW = {
    "files do not say which of two activations they need": {"bitnet"},
    "llama.cpp weighs its experts in another way than transformers": {"phimoe"},
    "its experts are multiplied in another way than all others": {"llama4"},
    "no converter writes such files": {"gptj"},
    "[its family is not decoded](#what-decodes-and-what-is-refused)": {
        *("bert", "dbrx", "gemma3n", "glm-dsa")
    },
}


def gguf_architectures() -> str:
    """How files of each architecture that llama.cpp names are opened."""
    import gguf
    from helpers.gguf_files import ARCHITECTURES as WRITTEN
    from helpers.gguf_files import name_architecture
    from models import test_gguf, test_gguf_families

    from skipsearch.models.fused.fused_adapter import FUSABLE
    from skipsearch.models.loading.gguf_architectures import ARCHITECTURES

    compared = {WRITTEN[name.partition("-")[0]] for name in test_gguf.IN_LLAMA_CPP}
    for name in test_gguf_families.IN_LLAMA_CPP:
        compared.add(name_architecture(test_gguf_families.make_model(name).config))
    native = {name for name, row in ARCHITECTURES.items() if row.model_type in FUSABLE}
    others = {*gguf.MODEL_ARCH_NAMES.values()} - {*ARCHITECTURES}
    both = {*ARCHITECTURES} & set().union(*WITHOUT_ROW.values())
    assert not both, f"WITHOUT_ROW says why these have no row, and they have one: {both}"
    rows = {
        "`native` alone": native,
        "`native`, with modules of transformers": {*ARCHITECTURES} - native,
        "one of these, and compared with llama.cpp": compared,
        **{f"refused: {why}": names for why, names in WITHOUT_ROW.items()},
        "refused: transformers has no decoder class for it": others.difference(
            *WITHOUT_ROW.values()
        ),
    }
    lines = ["| opened by | architectures |", "|---|---|"]
    lines += [
        f"| {how} | {', '.join(sorted(names))} ({len(names)}) |" for how, names in rows.items()
    ]
    return "\n".join(lines) + "\n"


def call_forms() -> str:
    """The forms in which models call tools, and whether `strict` takes them with `auto`."""
    from skipsearch.models.chat.formats import TOOL_FORMATS

    lines = ["| form | a call | `strict` with `auto` |", "|---|---|---|"]
    for form in TOOL_FORMATS:
        call = form.write_calls([("f", {"x": "value"})]).replace("\n", " ").replace("|", "\\|")
        code = f"`` {call} ``" if "`" in call else f"`{call}`"
        lines.append(f"| {form.name} | {code} | {'yes' if form.trigger else '–'} |")
    return "\n".join(lines) + "\n"


def table(first: str, second: str, entries: Mapping[str, str | Mapping[str, str]]) -> str:
    """The names as code, and what is said of each: a note under the heading `second`, or several
    under headings of their own.
    """
    notes = {
        name: {second: note} if isinstance(note, str) else note for name, note in entries.items()
    }
    heads = [head or second for head in next(iter(notes.values()))]
    lines = [f"| {' | '.join([first, *heads])} |", "|---" * (1 + len(heads)) + "|"]
    lines += [
        " | ".join([f"| `{name}`", *(note.replace("|", r"\|") for note in of_it.values())]) + " |"
        for name, of_it in notes.items()
    ]
    return "\n".join(lines) + "\n"


def methods(path: Path) -> Callable[[], str]:
    """What `skipsearch bench methods --json` wrote into docs/results."""
    return lambda: to_markdown(
        [MethodRow.from_dict(row) for row in json.loads(path.read_text("utf-8"))["rows"]]
    )


TABLES: dict[str, Callable[[], str]] = {
    "drafters": listed("drafters"),
    "exits": listed("exits"),
    "searchers": listed("searchers"),
    "engines": listed("engines"),
    "commands": commands,
    "call-forms": call_forms,
    "gguf-architectures": gguf_architectures,
    "profile-keys": reference.profile_keys,
    "request-fields": reference.request_fields,
    "draft-head": results.draft_head,
    "constraints": results.constraints,
    "compared-methods": results.compared_methods,
    "passes": lambda: results.passes(results.PASSES_WITH_VNNI, (2, 1)),
    "passes-two-threads": lambda: results.passes(results.PASSES_WITH_VNNI, (2,)),
    "passes-avx2": lambda: results.passes(results.PASSES_WITH_AVX2, (2, 1)),
    "long-contexts": results.long_contexts,
    "whole-answers": lambda: results.whole_answers_table(results.WHOLE_ANSWERS),
    "whole-answers-avx2": lambda: results.whole_answers_table(results.WHOLE_ANSWERS_WITH_AVX2),
    **{path.stem: methods(path) for path in results.METHODS},
}
PICTURES = {
    "whole-answers.svg": results.whole_answers_picture,
    "head-training.svg": results.head_training_picture,
}


def filled(text: str) -> str:
    """A page with its tables as the code has them now. Raises: KeyError for a table that nothing
    here makes.
    """
    return BLOCK.sub(
        lambda block: (
            f"<!-- {block['name']} -->\n{TABLES[block['name']]()}<!-- /{block['name']} -->"
        ),
        text,
    )


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")
    for file, draw in PICTURES.items():
        (results.PICTURES / file).write_text(draw(), "utf-8")
