"""Compiled code of other users is never run, damage is found, and sound files stay."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.cli.options import plain_warnings
from skipsearch.engine import code_cache
from skipsearch.engine.code_cache import CodeCache, open_code_cache
from skipsearch.errors import UntrustedCacheWarning

CODE = b"\x7fELF and some code"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not there yet, under another that is not there either."""
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "some" / "cache"))
    return tmp_path / "some" / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refused(folder: Path, sentence: str) -> None:
    """Opening says the sentence, in one line, and takes a private folder."""
    with pytest.warns(UntrustedCacheWarning, match=sentence) as caught:
        code_store = open_code_cache()
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert code_store.folder != folder
    assert mode(code_store.folder) == 0o700
    code_store.store("piece", CODE)
    assert code_store.read("piece") == CODE
    code_store.path_of("piece").unlink()


def test_whatever_is_made_is_for_this_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        code_store = open_code_cache()
        code_store.store("piece", CODE)
    finally:
        os.umask(before)
    assert code_store.folder == cache / "compiled"
    assert [mode(folder) for folder in (cache.parent, cache, code_store.folder)] == [0o700] * 3
    assert mode(code_store.path_of("piece")) == 0o600
    assert code_store.read("piece") == CODE
    assert open_code_cache() == code_store


@pytest.mark.parametrize("loose", [0o777, 0o775, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used_until_that_is_mended(
    cache: Path, loose: int
) -> None:
    folder = cache / "compiled"
    open_code_cache().store("piece", CODE)
    folder.chmod(loose)
    refused(
        folder,
        rf"mode {loose:o}\), so the code in it is not run: chmod 700 {folder}, or set "
        r"SKIPSEARCH_CACHE_DIR",
    )
    assert list(folder.iterdir()) == [folder / "piece.code"], "what lies there is left alone"
    folder.chmod(0o700)
    assert open_code_cache().read("piece") == CODE


@pytest.mark.parametrize("fine", [0o700, 0o755, 0o711])
def test_a_folder_that_others_may_only_read_is_used_in_silence(cache: Path, fine: int) -> None:
    folder = open_code_cache().folder
    folder.chmod(fine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_code_cache().folder == folder


def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_code_cache().folder
    owner = os.geteuid()
    real = code_cache.why_untrusted

    def seen_by_another(path: Path) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: owner + 1)
            return real(path)

    monkeypatch.setattr(code_cache, "why_untrusted", seen_by_another)
    refused(
        folder,
        rf"belongs to another user \(uid {owner}\), whose code is not run: set "
        r"SKIPSEARCH_CACHE_DIR",
    )


@pytest.mark.parametrize("there", ["folder", "nothing"])
def test_a_link_is_not_followed_to_a_folder(cache: Path, tmp_path: Path, there: str) -> None:
    cache.mkdir(parents=True)
    if there == "folder":
        (tmp_path / there).mkdir(mode=0o700)
    (cache / "compiled").symlink_to(tmp_path / there)
    refused(
        tmp_path / there,
        "is a link or a file where a folder for compiled code should be: remove it",
    )


def test_code_that_others_could_have_changed_is_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_store, elsewhere = open_code_cache(), CodeCache(tmp_path)
    code_store.store("piece", CODE)
    code_store.path_of("piece").chmod(0o664)
    assert code_store.read("piece") is None
    elsewhere.store("piece", CODE)
    code_store.path_of("piece").symlink_to(elsewhere.path_of("piece"))
    assert code_store.read("piece") is None
    assert elsewhere.read("piece") == CODE, "the link goes, not what it led to"
    os.mkfifo(code_store.path_of("piece"))
    assert code_store.read("piece") is None, "and nobody waits for the other end of a pipe"
    code_store.store("piece", CODE)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert code_store.read("piece") is None
    assert list(code_store.folder.iterdir()) == []


@given(st.data())
def test_any_flipped_bit_and_any_cut_is_found_and_removed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        code_store = CodeCache(Path(folder))
        code_store.store("piece", CODE)
        whole = code_store.path_of("piece").read_bytes()
        position = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            bit = 1 << data.draw(st.integers(0, 7))
            code_store.path_of("piece").write_bytes(
                whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :]
            )
        else:
            code_store.path_of("piece").write_bytes(whole[:position])
        assert code_store.read("piece") is None
        assert not code_store.path_of("piece").exists()
        code_store.store("piece", CODE)
        assert code_store.read("piece") == CODE


def test_one_that_cannot_be_read_now_is_not_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_store = open_code_cache()
    code_store.store("piece", CODE)

    def exhausted(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", exhausted)
        with pytest.raises(OSError, match="Too many"):
            code_store.read("piece")
    assert code_store.read("piece") == CODE


def test_two_that_keep_the_same_at_once_never_leave_a_half(cache: Path) -> None:
    code_store = open_code_cache()
    codes = [bytes([i]) * 50_000 for i in range(4)]
    begin = threading.Barrier(len(codes))

    def keep(code: bytes) -> None:
        begin.wait()
        for _ in range(20):
            code_store.store("piece", code)
            assert code_store.read("piece") in codes

    failed: list[object] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        workers = [threading.Thread(target=keep, args=(code,)) for code in codes]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        threading.excepthook = before
    assert not failed
    assert list(code_store.folder.iterdir()) == [code_store.path_of("piece")]


def test_a_private_folder_lasts_as_long_as_the_process() -> None:
    assert code_cache._process_folder() == code_cache._process_folder()
    assert code_cache._process_folder().is_dir()
    assert code_cache._make_process_folder()._finalizer.atexit  # type: ignore[attr-defined]


def test_the_command_line_says_it_in_one_sentence_and_lets_others_warn_as_they_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from skipsearch.cli import consoles
    from skipsearch.cli.terminal import Terminal

    monkeypatch.setattr(consoles, "err", Terminal(stderr=True))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *where: print("as before:", message)  # type: ignore[assignment]
        with plain_warnings():
            warnings.warn(UntrustedCacheWarning("/x lets [others] write to it"), stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    printed = capsys.readouterr()
    assert printed.err == "warning: /x lets [others] write to it\n"
    assert printed.out == "as before: something else\n"
