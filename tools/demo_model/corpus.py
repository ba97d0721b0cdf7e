"""Training text for the embedded model: source and docstrings of installed, permissively licensed
packages.

    python -m tools.demo_model.corpus --packages DIR [--packages DIR ...] --out corpus/

Three rules hold here and nowhere else:

* only packages whose own metadata names a permissive licence and no copyleft one;
* no standard-library text, because the tasks `pycode` and `prose` hold it out: a file is dropped
when more than
  `STDLIB_SHARE` of its longer lines also stand in this interpreter's standard library (vendored
  copies, backports);
* near-duplicates are dropped the same way, so that generated clients do not drown everything else.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import lzma
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PERMISSIVE = re.compile(
    r"\b(mit|bsd|apache|isc|psf|python software foundation|hpnd|zlib|unlicense|0bsd)\b", re.I
)
COPYLEFT = re.compile(r"\b(a?gpl|lgpl|mpl|epl|eupl|cc-by|gnu|mozilla|proprietary|commercial)", re.I)
EXCLUDED_PARTS = {
    "tests",
    "test",
    "testing",
    "_vendor",
    "vendor",
    "vendored",
    "_vendored",
    "typeshed",
    "lib2to3",
    "third_party",
    "extern",
    "migrations",
    "locale",
    "site-packages",
}
MAX_STDLIB_FRACTION = 0.15
MAX_DUPLICATE_FRACTION = 0.5
LONG_LINE_CHARS = 30  # characters; shorter lines (`return None`) are everybody's
MAX_PACKAGE_CHARS = 12_000_000  # characters of one package
HOLDOUT_ONE_IN = 100
END_OF_TEXT = "<|endoftext|>"
# A newline and the indentation behind it are one token; words keep their leading blank.
SPLIT = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


def permissive_licence(dist: Distribution) -> str | None:
    """The permissive licence the package declares in its metadata, or None."""
    meta: Any = dist.metadata  # an email.message.Message, which the stubs hide
    declared = [
        meta.get("License-Expression") or "",
        (meta.get("License") or "").split("\n")[0][:80],
    ]
    declared += [
        c.split("::")[-1].strip()
        for c in meta.get_all("Classifier") or []
        if c.startswith("License ::")
    ]
    text = " | ".join(part for part in declared if part)
    if COPYLEFT.search(text) or not PERMISSIVE.search(text):
        return None
    return (
        meta.get("License-Expression") or next(d for d in declared if PERMISSIVE.search(d))
    ).strip()


def find_packages(folders: Iterable[Path]) -> list[Package]:
    """Permissively licensed packages installed in `folders`, by name; the rest are left out."""
    found: dict[str, Package] = {}
    for dist in distributions(path=[str(f) for f in folders]):
        licence = permissive_licence(dist)
        files = tuple(
            sorted(
                Path(str(dist.locate_file(f)))
                for f in dist.files or []
                if f.suffix == ".py"
                and not EXCLUDED_PARTS & {p.lower() for p in f.parts}
                and not f.name.startswith(("test_", "conftest"))
            )
        )
        if licence and files:
            found.setdefault(
                dist.metadata["Name"].lower(),
                Package(dist.metadata["Name"], dist.version, licence, files),
            )
    return [found[name] for name in sorted(found)]


def long_lines(text: str) -> set[int]:
    return {hash(line.strip()) for line in text.split("\n") if len(line.strip()) >= LONG_LINE_CHARS}


def stdlib_lines() -> set[int]:
    lines: set[int] = set()
    for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"):
        if "site-packages" not in path.parts:
            lines |= long_lines(path.read_text("utf-8", "ignore"))
    return lines


def strip_header(text: str) -> str:
    """Without the leading comment block: licence headers repeat ten thousand times and teach
    nothing.
    """
    lines = text.replace("\r\n", "\n").expandtabs(4).split("\n")
    first = next(
        (i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0
    )
    return "\n".join(line.rstrip() for line in lines[first:])


def iter_docstrings(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 200:
                yield inspect.cleandoc(doc)


def iter_usable_files(packages: Iterable[Package]) -> Iterator[tuple[Package, Path, str]]:
    """(package, path, text) of every file that passes the three rules of this module."""
    stdlib, seen = stdlib_lines(), set[int]()
    for package in packages:
        room = MAX_PACKAGE_CHARS
        for path in sorted(
            package.files, key=lambda p: hashlib.sha256(str(p.name).encode()).hexdigest()
        ):
            try:
                text = strip_header(path.read_text("utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
            lines = long_lines(text)
            if (
                not 400 < len(text) < 200_000
                or len(text.encode()) > 1.02 * len(text)
                or len(lines) < 8
            ):
                continue
            if max(map(len, text.split("\n"))) > 400 or len(text) > room:
                continue
            if len(lines & stdlib) > MAX_STDLIB_FRACTION * len(lines) or len(
                lines & seen
            ) > MAX_DUPLICATE_FRACTION * len(lines):
                continue
            seen |= lines
            room -= len(text)
            yield package, path, text


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT, "<|pad|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=20,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 ids of all texts, an end-of-text id (0) behind each."""
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 2000):
        parts.extend(
            np.array([*item.ids, 0], dtype=np.uint16)
            for item in tokenizer.encode_batch(texts[start : start + 2000])
        )
    return np.concatenate(parts)


def write_text(folders: Sequence[Path], out: Path, prose_share: float) -> None:
    """text.jsonl and sources.json: sources of packages, and so many docstrings on their own beside
    them.
    """
    used: dict[str, dict[str, str]] = {}
    rows: list[str] = []
    prose: dict[str, str] = {}
    for package, _, text in iter_usable_files(find_packages(folders)):
        used[package.name] = {"version": package.version, "licence": package.licence}
        rows.append(text)
        prose |= {doc[:120]: doc for doc in iter_docstrings(text)}
    room = sum(map(len, rows)) * prose_share / (1 - prose_share)
    for doc in sorted(prose.values(), key=lambda d: hashlib.sha256(d.encode()).digest()):
        if room < 0:
            break
        rows.append(doc)
        room -= len(doc)
    rows.sort(key=lambda d: hashlib.sha256(d.encode()).digest())
    (out / "text.jsonl").write_text(
        "".join(json.dumps({"text": row}) + "\n" for row in rows), "utf-8"
    )
    (out / "sources.json").write_text(
        json.dumps({"characters": sum(map(len, rows)), "packages": used}, indent=1)
    )
    print(f"{len(rows)} texts, {sum(map(len, rows)) / 1e6:.1f} M characters, {len(used)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--packages", type=Path, action="append", required=True, help="a site-packages folder"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument(
        "--prose-share", type=float, default=0.2, help="of the characters, docstrings on their own"
    )
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="write text.jsonl, to train drafts on, and no tokenizer and no tokens",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.text_only:
        write_text(args.packages, args.out, args.prose_share)
        return

    train: list[str] = []
    heldout: list[str] = []
    prose: list[str] = []
    used: dict[str, dict[str, object]] = {}
    seen_docs: set[str] = set()
    for package, _path, text in iter_usable_files(find_packages(args.packages)):
        entry = used.setdefault(
            package.name, {"version": package.version, "licence": package.licence, "characters": 0}
        )
        entry["characters"] = int(str(entry["characters"])) + len(text)
        digest = hashlib.sha256(text.encode()).digest()
        held = int.from_bytes(digest[:4], "big") % HOLDOUT_ONE_IN == 0
        (heldout if held else train).append(text)
        for doc in iter_docstrings(text):
            if not held and doc[:120] not in seen_docs:
                seen_docs.add(doc[:120])
                prose.append(doc)
    code_chars = sum(map(len, train))
    wanted = int(code_chars * args.prose_share / (1 - args.prose_share))
    prose = sorted(prose, key=lambda d: hashlib.sha256(d.encode()).digest())
    chosen, total = [], 0
    for doc in prose:
        if total > wanted:
            break
        chosen.append(doc)
        total += len(doc)
    tokenizer = train_tokenizer(sorted(train, key=len)[::7] + chosen[::7], args.vocab)
    tokenizer.save(str(args.out / "tokenizer.json"))
    everything = sorted(train + chosen, key=lambda d: hashlib.sha256(d.encode()).digest())
    tokens = encode(tokenizer, everything)
    tokens.tofile(args.out / "train.bin")
    (args.out / "train.bin.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=1))
    encode(tokenizer, heldout).tofile(args.out / "heldout.bin")
    (args.out / "sources.json").write_text(
        json.dumps(
            {
                "python": sys.version.split()[0],
                "characters": code_chars + total,
                "prose_characters": total,
                "tokens": len(tokens),
                "packages": used,
            },
            indent=1,
        )
    )
    print(
        f"{len(train)} files, {len(chosen)} docstrings, {len(tokens) / 1e6:.1f} M tokens, "
        f"{len(used)} packages"
    )


if __name__ == "__main__":
    main()
