"""What the index behind lookup costs: time a token and memory a token, by kind and length of the
text.

`extend + match` adds tokens one by one and asks after each, as decoding does; `in one call` adds
the text at once, as a prompt. A query is a match and the next 8 tokens. A time is the least of
several runs. Memory is what the index holds at the end, beside the caller's tokens.

    python tests/benchmarks/lookup_index.py --tokens 1000 16000 128000
"""

from __future__ import annotations

import argparse
import gc
import random
import sysconfig
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

import skipsearch.demo
from skipsearch.drafters.lookup.suffix_index import DEFAULT_MAX_MATCH, SuffixIndex
from skipsearch.tasks.sources.stdlib import find_modules

VOCABULARY = 4096  # of the random text
QUERIES = 10_000
PROPOSED = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1_000, 16_000, 128_000],
        help="lengths of the texts",
    )
    parser.add_argument("--max-match", type=int, default=DEFAULT_MAX_MATCH)
    parser.add_argument("--runs", type=int, default=3, help="of which the fastest counts")
    args = parser.parse_args()
    natural = library_tokens(max(args.tokens))
    numbers = random.Random(0)
    drawn = [numbers.randrange(VOCABULARY) for _ in range(max(args.tokens))]
    print(
        f"max_match {args.max_match}; mean match: tokens of the longest match, over all positions\n"
    )
    print(
        f"{'text':<10}{'tokens':>8}{'extend + match':>18}{'in one call':>16}"
        f"{'query':>10}{'memory':>16}{'mean match':>12}"
    )
    for kind, text in (
        ("random", drawn),
        ("library", natural),
        ("all equal", [7] * max(args.tokens)),
    ):
        for tokens in args.tokens:
            print(row(kind, text[:tokens], args.max_match, args.runs), flush=True)


def library_tokens(count: int) -> list[int]:
    """The standard library's modules one after the other, in tokens of the embedded model."""
    tokenizer = Tokenizer.from_file(
        str(Path(skipsearch.demo.__file__).parent / "model" / "tokenizer.json")
    )
    tokens: list[int] = []
    for path in find_modules(Path(sysconfig.get_paths()["stdlib"])).values():
        tokens += tokenizer.encode(
            path.read_text("utf-8", errors="replace"), add_special_tokens=False
        ).ids
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(
        f"the standard library has {len(tokens)} tokens, fewer than {count}; give fewer --tokens"
    )


def row(kind: str, text: list[int], max_match: int, runs: int) -> str:
    index = SuffixIndex(max_match)
    index.extend(text)

    def one_piece() -> None:
        SuffixIndex(max_match).extend(text)

    def query() -> None:
        for _ in range(QUERIES):
            found = index.longest_match()
            index.continuation(found.position if found else 0, PROPOSED)

    one_by_one = fastest(lambda: walk(text, max_match), runs) / len(text)
    lengths = walk(text, max_match)
    return (
        f"{kind:<10}{len(text):>8}{one_by_one:>9.0f} "
        f"ns/token{fastest(one_piece, runs) / len(text):>7.0f} ns/token"
        f"{fastest(query, runs) / QUERIES:>7.0f} ns{held(text, max_match) / len(text):>8.0f} "
        f"B/token{lengths / len(text):>12.2f}"
    )


def walk(text: list[int], max_match: int) -> int:
    """Adds the tokens one by one and asks after each. Returns the sum of the matches' lengths."""
    index, lengths = SuffixIndex(max_match), 0
    for token in text:
        index.extend((token,))
        found = index.longest_match()
        lengths += found.length if found else 0
    return lengths


def fastest(work: Callable[[], object], runs: int) -> float:
    """Nanoseconds of the fastest run."""
    times = []
    for _ in range(runs):
        gc.collect()
        begin = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - begin)
    return min(times)


def held(text: list[int], max_match: int) -> int:
    """Bytes that an index of the text holds."""
    gc.collect()
    tracemalloc.start()
    index = SuffixIndex(max_match)
    for token in text:
        index.extend((token,))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


if __name__ == "__main__":
    main()
