"""`profile pull`: profiles out of somebody's Git repository, trusting nothing in it.

Nothing is ever checked out. One commit is fetched, without history, into a bare repository that is thrown away; from its tree,
regular *.yaml files under profiles/ are read as blobs, each is validated, and those that pass are written where their own content
says they belong, with the modules that they name by hash. So hooks, submodules, links, filters (LFS) and clever paths have nothing to
act on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

from skipsearch.errors import ModuleError, ProfileError
from skipsearch.fields import ModuleRef
from skipsearch.modules.files import parse_header
from skipsearch.profile.dump import save_bytes, save_text
from skipsearch.profile.gitcli import run_git
from skipsearch.profile.load import parse_profile
from skipsearch.profile.places import profile_path, user_folder
from skipsearch.strict_yaml import MAX_BYTES, printable

MAX_FILES = 5000
MODULE_BYTES = 256 * 2**20   # of a module that a pull brings
_HOST = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9.:\[\]-]*")
_REF = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9_][A-Za-z0-9_./-]*")


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of a pull. kept: paths under `folder`. refused: one sentence for each file that was left behind.

    signature: the git command that found it good, `verify-tag` or `verify-commit`; None if none was asked for.
    """

    url: str
    ref: str
    commit: str
    signature: str | None
    folder: Path
    kept: tuple[Path, ...]
    refused: tuple[str, ...]


def pull(address: str, signed: bool = False) -> Pulled:
    """Fetch the profiles of URL[@ref] into the user folder, in place of what an earlier pull of that URL left there.

    The folder gets a source.json with URL, ref and commit. A ref is a branch, a tag or a full commit hash; without one it is the
    repository's default branch. If a local path itself holds an `@`, write the ref (@HEAD) too.
    signed: git must find the signature of the tag or, for any other ref, of the commit good, with the keys that the user's own git
    configuration trusts.
    Raises: ProfileError if the address is not https, ssh or file, git fails, a signature that was asked for is not good, or not one
    valid profile is in it; what an earlier pull left is then untouched.
    """
    url, ref = split_address(address)
    with tempfile.TemporaryDirectory(prefix="skipsearch-pull-") as scratch:
        repository = Path(scratch, "repository")
        commit = _fetch(repository, url, ref, MAX_BYTES)
        signature = _verify_signature(repository) if signed else None
        files, refused = _profiles(repository, commit)
        modules = _modules(files, refused, Path(scratch, "modules"), url, ref, commit)
    if not files:
        why = f": {refused[0]}" if refused else "; it needs profiles/<org>--<model>/<task>/<device>--<dtype>.yaml"
        raise ProfileError(f"{url} holds no valid profile at {commit[:12]}{why}")
    folder = user_folder() / "pulled" / _folder_name(url)
    _replace(folder, files | modules, {"url": url, "ref": ref, "commit": commit, "signature": signature,
                             "pulled": datetime.now(UTC).isoformat(timespec="seconds")})
    return Pulled(url, ref, commit, signature, folder, tuple(folder / path for path in files), tuple(refused))


def split_address(address: str) -> tuple[str, str]:
    """URL[@ref] as (URL, ref). Raises: ProfileError for another scheme, a password in it, or a ref that git could misread."""
    scheme, _, rest = address.partition("://")
    authority, _, path = rest.partition("/")
    if scheme not in ("https", "ssh", "file") or not path or not address.isprintable() or " " in address:
        raise ProfileError(f"{printable(address, 100)} is no address of a profile repository; "
                           "write https://host/path, ssh://git@host/path or file:///path, then @ref if you want one")
    with_ref = re.fullmatch(r"(.*[^/])@([^@]+)", path)
    path, ref = with_ref.groups() if with_ref else (path, "HEAD")
    if not _REF.fullmatch(ref):
        raise ProfileError(f"{ref!r} is no branch, tag or commit; letters, digits and `._/-` may follow the @ of {scheme}://…@ref")
    user, at, host = authority.rpartition("@")
    if at and (scheme != "ssh" or ":" in user or not _HOST.fullmatch(user)):
        raise ProfileError(f"a {scheme} address must not hold a password or token, which would be written down with it; "
                           "leave it to git's credential helper")
    if (scheme == "file") != (host == "") or (host and not _HOST.fullmatch(host)):
        raise ProfileError(f"{host!r} is no host; write https://host/path, ssh://git@host/path or file:///path")
    return f"{scheme}://{authority}/{path}", ref


def _fetch(repository: Path, url: str, ref: str, most_bytes: int) -> str:
    """Fetch one commit without history into a new bare repository, less its files of more bytes than that; its hash."""
    run_git(["init", "--quiet", "--bare", "--template=", str(repository)])
    run_git(["remote", "add", "origin", url], repository)
    run_git(["fetch", "--quiet", "--depth=1", "--no-tags", f"--filter=blob:limit={most_bytes + 1}", "origin", ref], repository)
    commit = run_git(["rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}"], repository).decode("ascii").strip()
    # What the filter held back must stay away: without a remote to promise it, git calls it missing instead of fetching it.
    run_git(["remote", "remove", "origin"], repository)
    return commit


def _verify_signature(repository: Path) -> str:
    """Which of git's two commands found the signature of what was fetched good. Raises: ProfileError if it did not."""
    kind = run_git(["cat-file", "-t", "FETCH_HEAD"], repository).decode("ascii").strip()
    verb = "verify-tag" if kind == "tag" else "verify-commit"
    run_git([verb, "FETCH_HEAD"], repository, way_out="make its signer's key known to git, or pull without --signed")
    return verb


def _profiles(repository: Path, commit: str) -> tuple[dict[Path, bytes], list[str]]:
    """(path by content -> bytes) of each valid profile in a commit, and a sentence for each file that is none."""
    blobs: dict[str, str] = {}
    refused: list[str] = []
    for mode, oid, name in _tree(repository, commit):
        if mode in ("100644", "100755"):
            blobs[name] = oid
        else:
            refused.append(f"{name}: this is {'a symbolic link' if mode == '120000' else 'a submodule'}, which is not followed")
    files: dict[Path, bytes] = {}
    for name, content in _contents(repository, blobs):
        try:
            if content is None:
                raise ProfileError(f"{name}: the file is larger than {MAX_BYTES // 1024} KiB, which no profile needs")
            if content.startswith(b"version https://git-lfs"):
                raise ProfileError(f"{name}: this is stored with Git LFS, which profiles do not need; commit the file itself")
            path = profile_path(parse_profile(content, name))
            if name != path.as_posix():
                raise ProfileError(f"{name}: its content belongs at {path}")
            files[path] = content
        except ProfileError as error:
            refused.append(str(error))
    return files, refused


def _modules(files: dict[Path, bytes], refused: list[str], repository: Path, url: str, ref: str, commit: str) -> dict[Path, bytes]:
    """The modules that these profiles name, by path; a profile whose module is missing, or is not the one it means, is refused.

    Only for them a second fetch brings larger files, into `repository`. Raises: ProfileError if the repository changed meanwhile.
    """
    named = {path: parse_profile(content, str(path)).candidate.modules for path, content in files.items()}
    if not any(named.values()):
        return {}
    if _fetch(repository, url, ref, MODULE_BYTES) != commit:
        raise ProfileError(f"{url} changed while it was read: pull again")
    blobs = {name: oid for mode, oid, name in _tree(repository, commit, ".safetensors") if mode in ("100644", "100755")}
    found: dict[Path, bytes] = {}
    for path, refs in named.items():
        try:
            for module in refs:
                there, content = _module(module, path, repository, blobs)
                found[there] = content
        except (ProfileError, ModuleError) as error:
            del files[path]
            refused.append(f"{path}: {error}")
    return found


def _module(ref: ModuleRef, profile: Path, repository: Path, blobs: dict[str, str]) -> tuple[Path, bytes]:
    """Path and bytes of the module that a profile names, from its folder or the one above. Raises: ProfileError, ModuleError."""
    places = [place for folder in (profile.parent, profile.parent.parent) if (place := folder / ref.file).as_posix() in blobs]
    for place in places:
        [(_, content)] = _contents(repository, {str(place): blobs[place.as_posix()]}, MODULE_BYTES)
        if content is not None and hashlib.sha256(content).hexdigest() == ref.sha256:
            parse_header(BytesIO(content), len(content), str(place))
            return place, content
    why = f"is not the one it means, or has more than {MODULE_BYTES // 2**20} MiB" if places else "is not in the repository"
    raise ProfileError(f"its module {ref.file} {why}")


def _tree(repository: Path, commit: str, suffix: str = ".yaml") -> Iterator[tuple[str, str, str]]:
    """(mode, blob, path) of what could be a profile (or another file of that suffix) or pretends to be one."""
    listing = run_git(["ls-tree", "-r", "-z", "--full-tree", commit, "--", "profiles/"], repository)
    entries = listing.split(b"\0")[:-1]
    if len(entries) > MAX_FILES:
        raise ProfileError(f"the repository has more than {MAX_FILES} files under profiles/; ask its owner to split it")
    for entry in entries:
        about, _, path = entry.partition(b"\t")
        mode, kind, oid = about.decode("ascii").split()
        if path.endswith(suffix.encode()) or kind == "commit" or mode == "120000":
            yield mode, oid, printable(path.decode("utf-8", "replace"), 300)


def _contents(repository: Path, blobs: dict[str, str], most_bytes: int = MAX_BYTES) -> Iterator[tuple[str, bytes | None]]:
    """(path, bytes) of each blob; None for one larger than a profile may be, or than `most_bytes`."""
    checks = run_git(["cat-file", "--batch-check=%(objectsize)"], repository, _lines(blobs)).split(b"\n")
    # a size is no number where the fetch's filter has left the blob out already
    small = {name: blobs[name] for name, size in zip(blobs, checks, strict=False) if size.isdigit() and int(size) <= most_bytes}
    yield from ((name, None) for name in blobs if name not in small)
    stream = BytesIO(run_git(["cat-file", "--batch=%(objectsize)"], repository, _lines(small)))
    for name in small:
        content = stream.read(int(stream.readline()))
        stream.readline()
        yield name, content


def _lines(blobs: dict[str, str]) -> bytes:
    return "".join(f"{oid}\n" for oid in blobs.values()).encode("ascii")


def _folder_name(url: str) -> str:
    """Readable, and different for different URLs."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url.partition("://")[2]).strip("-.").removesuffix(".git")[:80]
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _replace(folder: Path, files: dict[Path, bytes], source: dict[str, str | None]) -> None:
    """Put the files and source.json at `folder`; a reader sees the old folder or the new one.

    Raises: ProfileError if the user folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pulling-") as scratch:
            fresh = Path(scratch, "new")
            for path, content in files.items():
                save_bytes(content, fresh / path)
            save_text(json.dumps(source, indent=1) + "\n", fresh / "source.json")
            if folder.exists():
                os.rename(folder, Path(scratch, "old"))
            os.rename(fresh, folder)
    except OSError as error:
        raise ProfileError(f"cannot write {folder}: {error.strerror or error}; XDG_DATA_HOME chooses another place") from error
