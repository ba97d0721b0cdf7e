"""Coverage-guided fuzzing of the profile reader, by hand: `pip install atheris`, then

    python tests/profile/fuzz_atheris.py FOLDER -max_total_time=600 -timeout=1 -rss_limit_mb=600

FOLDER keeps the inputs that reached something new, and gets the golden files to start from.
Whatever is not a `Profile` or a `ProfileError` ends the run, and the input lies in the current
folder as crash-…; so does one that takes longer than a second."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["skipsearch", "yaml"]):
    from test_profile_fuzz import SEEDS, SNIPPETS, mutate, survive


def mutator(content: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own mutations seldom leave valid YAML: every second input comes from the
    mutations that know its snippets.
    """
    return mutate(random.Random(seed))[:max_size] if seed % 2 else atheris.Mutate(content, max_size)


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if len(folders) != 1:
        sys.exit(
            "give one folder for the inputs: python tests/profile/fuzz_atheris.py FOLDER "
            "-max_total_time=600"
        )
    folders[0].mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate([*SEEDS, *SNIPPETS]):
        (folders[0] / f"seed-{i:03}").write_bytes(seed)
    atheris.Setup(
        sys.argv, lambda content: survive(bytes(content)) and None, custom_mutator=mutator
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
