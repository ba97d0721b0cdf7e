"""llguidance and xgrammar side by side: the time of a mask, of roll-back, and of forced tokens.

    python tests/benchmarks/constraint_libraries.py --model smollm2-135m-instruct-gguf

It needs `pip install llguidance xgrammar`. Each library follows the same JSON texts token by token
under the same schema. The second vocabulary repeats the model's tokens under new ids, up to the
size of `--large`; masks depend on the number of tokens, not on the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import llguidance.hf
import llguidance.numpy
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from skipsearch.core.constraint import JSON_STYLE
from skipsearch.engine import load_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["library", "server", "command line"]},
        "year": {"type": "integer"},
        "authors": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "year", "authors"],
    "additionalProperties": False,
}
TEXTS = [
    json.dumps({"name": name, "kind": kind, "year": year, "authors": authors}, ensure_ascii=False)
    for name, kind, year, authors in [
        ("a parser of dates", "library", 1998, ["Ada", "Grace"]),
        ("Häuser & Gärten", "server", 2026, []),
        ("find a file by its content", "command line", 7, ["one", "two", "three"]),
    ]
]


class TokenTable:
    """A tokenizer in the form that llguidance wraps: the bytes of each token."""

    def __init__(self, pieces: Sequence[bytes], encode: Callable[[str], list[int]], eos: int):
        self.tokens, self.eos_token_id, self.bos_token_id = list(pieces), eos, None
        self.special_token_ids = [eos]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "ignore"))


def time_us(function: Callable[[], object]) -> float:
    """Return the microseconds of one call."""
    began = perf_counter()
    function()
    return 1e6 * (perf_counter() - began)


def measure_llguidance(table: TokenTable, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    prepared = LLTokenizer(TokenizerWrapper(table), len(table.tokens))
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, JSON_STYLE)
    mask = llguidance.numpy.allocate_token_bitmask(1, len(table.tokens))
    times: dict[str, list[float]] = {"compile": [], "mask": [], "roll back": [], "forced": []}
    forced = 0
    for text in texts:
        times["compile"].append(time_us(lambda: LLMatcher(prepared, grammar)))
        matcher = LLMatcher(prepared, grammar)
        assert not matcher.is_error(), matcher.get_error()
        for token in text:
            times["mask"].append(
                time_us(lambda m=matcher: llguidance.numpy.fill_next_token_bitmask(m, mask))
            )
            times["forced"].append(time_us(matcher.compute_ff_tokens))
            forced += bool(matcher.compute_ff_tokens())
            assert matcher.consume_token(token)
            times["roll back"].append(
                time_us(lambda m=matcher, t=token: (m.rollback(1), m.consume_token(t)))
            )
    return summarise(times) | {"states with forced tokens": forced / sum(map(len, texts))}


def measure_xgrammar(table: TokenTable, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    info = xgrammar.TokenizerInfo(table.tokens, stop_token_ids=[table.eos_token_id])
    times: dict[str, list[float]] = {"compile": [], "mask": [], "roll back": [], "forced": []}
    mask = xgrammar.allocate_token_bitmask(1, len(table.tokens))
    forced = 0
    for text in texts:
        compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

        def compile_schema(compiler: Any = compiler) -> Any:
            return compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

        times["compile"].append(time_us(compile_schema))
        matcher = xgrammar.GrammarMatcher(compile_schema())
        for token in text:
            times["mask"].append(time_us(lambda m=matcher: m.fill_next_token_bitmask(mask)))
            times["forced"].append(time_us(matcher.find_jump_forward_string))
            forced += bool(matcher.find_jump_forward_string())
            assert matcher.accept_token(token)
            times["roll back"].append(
                time_us(lambda m=matcher, t=token: (m.rollback(1), m.accept_token(t)))
            )
    return summarise(times) | {"states with forced text": forced / sum(map(len, texts))}


def summarise(times: dict[str, list[float]]) -> dict[str, float]:
    """Return medians, and the slowest mask, in microseconds."""
    medians = {name: median(values) for name, values in times.items()}
    return medians | {"slowest mask": max(times["mask"])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct-gguf")
    parser.add_argument("--large", type=int, default=128_000)
    args = parser.parse_args()
    model = load_model(args.model, engine="lean", dtype="bfloat16")
    tokenizer, eos = model.tokenizer, model.spec.eos_token_ids[0]
    prepared = llguidance.hf.from_tokenizer(tokenizer, model.spec.vocab_size)
    pieces = [prepared.decode_bytes([token]) for token in range(model.spec.vocab_size)]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    texts = [encode(text) for text in TEXTS]
    larger = [*pieces, *(b"~" + piece for piece in pieces), *(b"^" + piece for piece in pieces)]
    for tokens in (pieces, larger[: args.large]):
        table = TokenTable(tokens, encode, eos)
        for name, measure in (("llguidance", measure_llguidance), ("xgrammar", measure_xgrammar)):
            figures = ", ".join(
                f"{key} {value:.2f}" for key, value in measure(table, texts).items()
            )
            print(f"{len(tokens):,} tokens, {name}: {figures} (µs; shares of states)", flush=True)


if __name__ == "__main__":
    main()
