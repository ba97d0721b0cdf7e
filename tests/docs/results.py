"""The documents' results: tables and bar charts from the files that `tests/benchmarks/recipes.py
--out` and its like wrote into docs/results.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipsearch.report.theme import (
    COLOURS,
    GAIN,
    INK,
    MARKERS,
    MUTED,
    SERIES_COLOURS,
    themed_figure,
)

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
METHODS = sorted((ROOT / "docs" / "results").glob("methods-*.json"))
COMPARED_METHODS = {
    "GSM8K": "methods-qwen-1b5-gsm8k",
    "`chat`": "methods-qwen-1b5-chat",
    "HumanEval, sampled": "methods-qwen-1b5-humaneval",
    "GSM8K, bfloat16": "methods-qwen-1b5-gsm8k-bf16",
    "`chat`, bfloat16": "methods-qwen-1b5-chat-bf16",
    "HumanEval, sampled, bfloat16": "methods-qwen-1b5-humaneval-bf16",
}  # of one model, by task and format
# Their texts depend on draws.
SAMPLED = ("methods-qwen-1b5-humaneval", "methods-qwen-1b5-humaneval-bf16")
RECIPE_FILES = ROOT / "docs" / "results"
UNTRAINED = ("lookup", "skip, reading less", "lookup, then skip, reading less")
DRAFT_HEAD = {
    "bfloat16": "draft-head-smollm2-bfloat16.json",
    "8 bits": "draft-head-smollm2-8bit.json",
    "Q4_1": "draft-head-smollm2-q4_1.json",
}  # weights of SmolLM2 -> recipes with a trained head and without
TASK_NAMES = {
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval, greedy",
    "chat": "`chat`",
    "specbench-chat": "Spec-Bench: chat (MT-bench)",
    "specbench-translation": "Spec-Bench: translation",
    "specbench-summarization": "Spec-Bench: summarisation",
    "specbench-qa": "Spec-Bench: questions",
    "specbench-math_reasoning": "Spec-Bench: mathematics",
    "specbench-rag": "Spec-Bench: RAG",
}
PICTURED = {"gsm8k": "GSM8K", "chat": "chat"}
WHOLE_ANSWERS = sorted((ROOT / "docs" / "results").glob("whole-answers-*.json"))
WHOLE_ANSWERS_WITH_AVX2 = sorted((ROOT / "docs" / "results").glob("avx2-whole-answers-*.json"))
# Systems of `bench run` -> what tables and bars call them.
BARS = {"profile": "chosen by tune", "lookup": "lookup alone", "llama-cpp": "llama.cpp"}
HEAD_TRAINING = "head-training-qwen1.5b.json"  # α by draft step, and the minutes of each
# Passes of native and llama.cpp, by model, format and threads: with VNNI, and with AVX2 alone.
PASSES_WITH_VNNI, PASSES_WITH_AVX2 = "passes-zen4.json", "passes-avx2.json"
LONG_CONTEXTS = "passes-long-zen4.json"  # the same by context and format of K/V


def of_tasks(file: str) -> dict[str, dict[str, Any]]:
    """The entries of a file of `recipes.py`, by task."""
    found = json.loads((RECIPE_FILES / file).read_text("utf-8"))
    return {entry["task"]: entry for entry in found["tasks"]}


def speedup(row: dict[str, Any]) -> str:
    """Mean and interval, as tables have them."""
    return (
        f"{row['speedup']['mean']:.2f}× ({row['speedup']['low']:.2f}–{row['speedup']['high']:.2f})"
    )


def list_task_rows(
    files: Mapping[str, str], names: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any], dict[str, dict[str, Any]], str]]:
    """Yield (start of a line, entry, its rows by name, speedups as cells) for each task of files.

    files: by weights. names: of the rows whose speedups are shown.
    """
    for weights, file in files.items():
        for task, entry in of_tasks(file).items():
            by_name = {row["name"]: row for row in entry["rows"]}
            cells = [speedup(by_name[name]) if name in by_name else "–" for name in names]
            start = f"| {TASK_NAMES[task]}, {weights} | {entry['prompts']}"
            yield start, entry, by_name, " | ".join(cells)


def passes(name: str, threads: Sequence[int]) -> str:
    """Passes of the engine native and of llama.cpp over the same file, by number of tokens."""
    heads = ("model, weights, threads", "ms a token", "over llama.cpp's", "share of read speed")
    heads += ("v 2, 4, 8, 16", "llama.cpp's", "prefill of 512, over llama.cpp's")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in json.loads((RECIPE_FILES / name).read_text("utf-8")):
        if entry["threads"] in threads:
            start = f"{entry['model']}, {entry['threads']}"
            share = f"{entry['read_rate'] / entry['read_ceiling']:.2f}"
            one, ratio, v, prefill = _describe_passes(entry["ms"])
            lines.append(f"| {start} | {one} | {ratio} | {share} | {v} | {prefill} |")
    return "\n".join(lines) + "\n"


def long_contexts() -> str:
    """The same after long contexts, with K/V in the dtype and in 8 bits."""
    heads = ("context", "K/V", "ms a token", "over llama.cpp's", "v 2, 4, 8, 16", "llama.cpp's")
    heads += ("prefill, over llama.cpp's",)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in json.loads((RECIPE_FILES / LONG_CONTEXTS).read_text("utf-8")):
        one, ratio, v, prefill = _describe_passes(entry["ms"])
        kv = {"auto": "float32, llama.cpp's float16", "int8": "8 bits, both"}
        name = f"{entry['context']:,} | {kv[entry['kv_cache_dtype']]}"
        seconds = entry["ms"]["native"]["prefill"] / 1e3
        lines.append(f"| {name} | {one} | {ratio} | {v} | {seconds:.1f} s, {prefill} |")
    return "\n".join(lines) + "\n"


def _describe_passes(ms: dict[str, dict[str, float]]) -> tuple[str, str, str, str]:
    """Cells: ms of one token, that over llama.cpp's, v of both, prefill over llama.cpp's."""
    ours, theirs = ms["native"], ms["llama.cpp"]
    v = (
        ", ".join(f"{by[n] / by['1']:.2f}" for n in ("2", "4", "8", "16")) for by in (ours, theirs)
    )
    prefill = f"{ours['prefill'] / theirs['prefill']:.2f}"
    return f"{ours['1']:.2f}", f"{ours['1'] / theirs['1']:.2f}", " | ".join(v), prefill


def compared_methods() -> str:
    """The speedup of every method on every task, and what its paper reports."""
    tables = {
        title: {
            row["method"]: row
            for row in json.loads((RECIPE_FILES / f"{stem}.json").read_text("utf-8"))["rows"]
        }
        for title, stem in COMPARED_METHODS.items()
    }
    methods = dict.fromkeys(name for table in tables.values() for name in table)
    methods["best recipe"] = methods.pop("best recipe")  # last, whichever table ends with others
    heads = ["method", *tables, "as published, elsewhere"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in methods:
        rows = [table.get(name) for table in tables.values()]
        cells = ["–" if row is None else speedup(row) for row in rows]
        published = next((row["published"] for row in rows if row and row["published"]), "")
        lines.append(f"| {' | '.join([name, *cells, published])} |")
    return "\n".join(lines) + "\n"


def draft_head() -> str:
    """Recipes with a trained head, with a pretrained model, and those without one."""
    names = [*UNTRAINED, "mtp: mtp", "mtp: lookup,mtp"]
    heads = [name.rpartition(": ")[2].replace(",mtp", ", then mtp") for name in names]
    lines = [
        f"| task, weights | prompts | {' | '.join(heads)} | α of the head |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for start, _, by_name, cells in list_task_rows(DRAFT_HEAD, names):
        lines.append(f"{start} | {cells} | {by_name['mtp: mtp']['alpha']:.2f} |")
    return "\n".join(lines) + "\n"


def constraints() -> str:
    """Decoding under a constraint: plain, with forced tokens, with all."""
    entries = of_tasks("constrained-smollm2.json")
    names = list(dict.fromkeys(row["name"] for entry in entries.values() for row in entry["rows"]))
    lines = [
        "| drafters | " + " | ".join(f"`{task}`" for task in entries) + " |",
        "|---|" + "---|" * len(entries),
        "| plain, under the constraint | "
        + " | ".join(
            f"{entry['plain_ms_per_token']['mean']:.2f} ms a token, the mask "
            f"{entry['mask_us_per_token'] / 1e3:.2f}"
            for entry in entries.values()
        )
        + " |",
    ]
    for name in names:
        by_task = [{row["name"]: row for row in e["rows"]}.get(name) for e in entries.values()]
        cells = ["–" if row is None else speedup(row) for row in by_task]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def whole_answers(task: str) -> list[dict[str, Any]]:
    """The rows of a task that its panel shows, of each model.

    Speedups are over plain decoding by the engine native.
    """
    return [
        row | {"name": f"{entry['name']}, {BARS[row['system']]}"}
        for entry in map(_read_whole_answers, WHOLE_ANSWERS)
        for row in entry["bench"]["rows"]
        if entry["task"] == task and row["system"] in BARS
    ]


def _read_whole_answers(path: Path) -> dict[str, Any]:
    """What `tune` chose, and what `bench run --json` measured of it."""
    return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def whole_answers_table(files: Sequence[Path]) -> str:
    """Whole answers of pretrained models: plain, drafted, and by llama.cpp."""
    heads = ("task, model", "prompts", "plain", *BARS.values())
    heads += ("masks judged", "chosen")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in map(_read_whole_answers, files):
        rows = {row["system"]: row for row in entry["bench"]["rows"]}
        cells = [f"{TASK_NAMES[entry['task']]}, {entry['name']}", rows["plain"]["prompts"]]
        cells += [f"{rows['plain']['ms_per_token']:.1f} ms", *(speedup(rows[s]) for s in BARS)]
        cells += [entry["masks"], entry["recipe"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def whole_answers_picture() -> str:
    """Plain and drafted decoding of whole answers by two pretrained models, as bars."""
    panels = {title: whole_answers(task) for task, title in PICTURED.items()}
    labels = [row["name"] for row in whole_answers("chat")]
    return draw_bars(panels, labels, figsize=(8.4, 2.6), most=2.25)


def draw_bars(
    panels: dict[str, list[dict[str, Any]]],
    labels: list[str],
    figsize: tuple[float, float],
    most: float,
) -> str:
    """Speedups as bars, an SVG that follows light and dark.

    panels: rows by title. labels: one for each row. most: the end of the axis.
    """
    with drawing(figsize) as figure:
        for place, (title, rows) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), place + 1)
            for k, row in enumerate(rows):
                mean, low, high = (row["speedup"][key] for key in ("mean", "low", "high"))
                axes.barh([k], [mean], height=0.62, color=GAIN, alpha=0.85)
                axes.plot([low, high], [k, k], color=INK, linewidth=1.4)
                axes.annotate(
                    f"{mean:.2f}×",
                    (high, k),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                    fontweight="bold",
                )
            axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
            axes.set(xlim=(0, most), title=title, ylim=(len(rows) - 0.5, -0.5))
            axes.set_yticks(range(len(rows)), labels if not place else [""] * len(rows), color=INK)
            axes.tick_params(left=False)
            axes.spines["left"].set_visible(False)
        figure.supxlabel("times as fast as plain decoding", fontsize="medium")
        return themed_svg(figure)


def head_training_picture() -> str:
    """The acceptance of each step of a trained head, over the time of its training."""
    curve = json.loads((RECIPE_FILES / HEAD_TRAINING).read_text("utf-8"))
    with drawing((8.4, 2.6)) as figure:
        axes = figure.add_subplot()
        for step, (alpha, colour, marker) in enumerate(
            zip(curve["alpha"], SERIES_COLOURS, MARKERS, strict=False), 1
        ):
            style = {"color": colour, "marker": marker, "linewidth": 1.6, "markersize": 5}
            axes.plot(curve["minutes"], alpha, label=f"step {step}", **style)
        axes.set(xlabel="minutes of training", ylabel="α on text kept aside", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(axis="y")
        axes.legend(loc="lower right", frameon=False, ncols=3)
        return themed_svg(figure)


@contextmanager
def drawing(size: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure of this size, in inches, that is drawn the same way each time."""
    import matplotlib

    with themed_figure() as figure_of, matplotlib.rc_context({"svg.hashsalt": "recipes"}):
        yield figure_of(figsize=size, layout="constrained")


def themed_svg(figure: Any) -> str:
    """The figure as an SVG that follows light and dark."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    pairs = {
        dark: " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())
        for dark in (0, 1)
    }
    rules = f"svg {{ {pairs[0]} }} @media (prefers-color-scheme: dark) {{ svg {{ {pairs[1]} }} }}"
    head, _, rest = svg.partition("<defs>")
    return f"{head}<style>{rules}</style>\n <defs>{rest}"
