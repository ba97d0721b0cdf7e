"""Pull profiles from a Git repository without trusting its content (`profile pull`).

Nothing is checked out. One commit is fetched without history into a temporary bare repository. From
its tree, regular *.yaml files under profiles/ are read as blobs and validated. Valid profiles are
stored at the path for their content, with the modules that they name by hash. So hooks, submodules,
links, filters (LFS) and crafted paths have no effect."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

from skipsearch.core.files import new_folder, save_file
from skipsearch.core.schema_types import ModuleRef
from skipsearch.core.strict_yaml import MAX_BYTES, make_printable
from skipsearch.drafters.trained.module_files import read_module_header
from skipsearch.errors import ModuleError, ProfileError
from skipsearch.profile.git_command import run_git
from skipsearch.profile.load import parse_profile
from skipsearch.profile.paths import profile_path, user_folder

MAX_FILES = 5000
MAX_MODULE_BYTES = 256 * 2**20  # of one pulled module
_HOST = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9.:\[\]-]*")
_REF = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9_][A-Za-z0-9_./-]*")


@dataclass(frozen=True, slots=True)
class PullResult:
    """The outcome of a pull."""

    url: str
    ref: str  # branch, tag or commit, as the user named it
    commit: str
    signature: (
        str | None
    )  # git command that verified the signature: verify-tag or verify-commit; None: not checked
    folder: Path
    accepted_files: tuple[Path, ...]  # paths under `folder`
    rejections: tuple[str, ...]  # one sentence for each file that was rejected


def pull_repository(address: str, require_signature: bool = False) -> PullResult:
    """Fetch the profiles of URL[@ref] into the user's data folder, in place of an earlier pull.

    address: its ref is a branch, a tag or a full commit hash. Without a ref, the repository's
    default branch is used. A local path with an `@` in it needs a ref, such as @HEAD.
    require_signature: the tag or, for any other ref, the commit must have a signature that git
    verifies with the keys that the user's git configuration trusts.

    source.json in the folder records URL, ref and commit. Raises: ProfileError if the address is
    not https, ssh or file, git fails, a required signature is not valid, or no profile is valid. An
    earlier pull is then kept.
    """
    url, ref = split_address(address)
    with tempfile.TemporaryDirectory(prefix="skipsearch-pull-") as scratch:
        repository = Path(scratch, "repository")
        commit = _fetch(repository, url, ref, MAX_BYTES)
        signature = _verify_signature(repository) if require_signature else None
        files, rejections = _read_profiles(repository, commit)
        modules = _read_modules(files, rejections, Path(scratch, "modules"), url, ref, commit)
    if not files:
        why = (
            f": {rejections[0]}"
            if rejections
            else "; it needs profiles/<org>--<model>/<task>/<device>--<dtype>.yaml"
        )
        raise ProfileError(f"{url} holds no valid profile at {commit[:12]}{why}")
    folder = user_folder() / "pulled" / _folder_name(url)
    _replace_folder(
        folder,
        files | modules,
        {
            "url": url,
            "ref": ref,
            "commit": commit,
            "signature": signature,
            "pulled": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
    return PullResult(
        url,
        ref,
        commit,
        signature,
        folder,
        tuple(folder / path for path in files),
        tuple(rejections),
    )


def split_address(address: str) -> tuple[str, str]:
    """Split URL[@ref] into (URL, ref).

    Raises: ProfileError for another scheme, a password in the URL, or a ref that git could misread.
    """
    scheme, _, rest = address.partition("://")
    authority, _, path = rest.partition("/")
    if (
        scheme not in ("https", "ssh", "file")
        or not path
        or not address.isprintable()
        or " " in address
    ):
        raise ProfileError(
            f"{make_printable(address, 100)} is no address of a profile repository; "
            "write https://host/path, ssh://git@host/path or file:///path, then @ref if you want "
            "one"
        )
    with_ref = re.fullmatch(r"(.*[^/])@([^@]+)", path)
    path, ref = with_ref.groups() if with_ref else (path, "HEAD")
    if not _REF.fullmatch(ref):
        raise ProfileError(
            f"{ref!r} is no branch, tag or commit; letters, digits and `._/-` may follow the @ of "
            f"{scheme}://…@ref"
        )
    user, at_sign, host = authority.rpartition("@")
    if at_sign and (scheme != "ssh" or ":" in user or not _HOST.fullmatch(user)):
        raise ProfileError(
            f"a {scheme} address must not hold a password or token, which would be written down "
            "with it; "
            "leave it to git's credential helper"
        )
    if (scheme == "file") != (host == "") or (host and not _HOST.fullmatch(host)):
        raise ProfileError(
            f"{host!r} is no host; write https://host/path, ssh://git@host/path or file:///path"
        )
    return f"{scheme}://{authority}/{path}", ref


def _fetch(repository: Path, url: str, ref: str, max_bytes: int) -> str:
    """Fetch one commit without history into a new bare repository; return its hash.

    Files larger than `max_bytes` are left out.
    """
    run_git(["init", "--quiet", "--bare", "--template=", str(repository)])
    run_git(["remote", "add", "origin", url], repository)
    run_git(
        [
            "fetch",
            "--quiet",
            "--depth=1",
            "--no-tags",
            f"--filter=blob:limit={max_bytes + 1}",
            "origin",
            ref,
        ],
        repository,
    )
    commit = (
        run_git(["rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}"], repository)
        .decode("ascii")
        .strip()
    )
    # Without a remote, git cannot fetch a file that the filter left out, and reports it as missing.
    run_git(["remote", "remove", "origin"], repository)
    return commit


def _verify_signature(repository: Path) -> str:
    """Verify the signature of the fetched tag or commit; return the git command that did so.

    Raises: ProfileError if the signature is not valid.
    """
    kind = run_git(["cat-file", "-t", "FETCH_HEAD"], repository).decode("ascii").strip()
    verb = "verify-tag" if kind == "tag" else "verify-commit"
    run_git(
        [verb, "FETCH_HEAD"],
        repository,
        way_out="make its signer's key known to git, or pull without --signed",
    )
    return verb


def _read_profiles(repository: Path, commit: str) -> tuple[dict[Path, bytes], list[str]]:
    """Return ({path: bytes} of valid profiles, a sentence for each invalid file)."""
    blobs: dict[str, str] = {}
    rejections: list[str] = []
    for mode, oid, name in _list_tree(repository, commit):
        if mode in ("100644", "100755"):
            blobs[name] = oid
        else:
            rejections.append(
                f"{name}: this is {'a symbolic link' if mode == '120000' else 'a submodule'}, "
                "which is not followed"
            )
    files: dict[Path, bytes] = {}
    for name, content in _read_blobs(repository, blobs):
        try:
            if content is None:
                raise ProfileError(
                    f"{name}: the file is larger than {MAX_BYTES // 1024} KiB, which no profile "
                    "needs"
                )
            if content.startswith(b"version https://git-lfs"):
                raise ProfileError(
                    f"{name}: this is stored with Git LFS, which profiles do not need; commit the "
                    "file itself"
                )
            path = profile_path(parse_profile(content, name))
            if name != path.as_posix():
                raise ProfileError(f"{name}: its content belongs at {path}")
            files[path] = content
        except ProfileError as error:
            rejections.append(str(error))
    return files, rejections


def _read_modules(
    files: dict[Path, bytes],
    rejections: list[str],
    repository: Path,
    url: str,
    ref: str,
    commit: str,
) -> dict[Path, bytes]:
    """Return {path: bytes} of the modules that these profiles name.

    Modules need a second fetch, with a higher size limit, into `repository`. A profile whose module
    is missing or has another hash is moved from `files` to `rejections`. Raises: ProfileError if
    the repository changed meanwhile.
    """
    refs_by_profile = {
        path: parse_profile(content, str(path)).measured_recipe.modules
        for path, content in files.items()
    }
    if not any(refs_by_profile.values()):
        return {}
    if _fetch(repository, url, ref, MAX_MODULE_BYTES) != commit:
        raise ProfileError(f"{url} changed while it was read: pull again")
    blobs = {
        name: oid
        for mode, oid, name in _list_tree(repository, commit, ".safetensors")
        if mode in ("100644", "100755")
    }
    modules: dict[Path, bytes] = {}
    for path, refs in refs_by_profile.items():
        try:
            for ref_of_module in refs:
                module_path, content = _read_module(ref_of_module, path, repository, blobs)
                modules[module_path] = content
        except (ProfileError, ModuleError) as error:
            del files[path]
            rejections.append(f"{path}: {error}")
    return modules


def _read_module(
    ref: ModuleRef, profile: Path, repository: Path, blobs: dict[str, str]
) -> tuple[Path, bytes]:
    """Return (path, bytes) of a profile's module, from the profile's folder or its parent.

    Raises: ProfileError, ModuleError.
    """
    candidates = [folder / ref.file for folder in (profile.parent, profile.parent.parent)]
    candidates = [path for path in candidates if path.as_posix() in blobs]
    for path in candidates:
        blob = {str(path): blobs[path.as_posix()]}
        [(_, content)] = _read_blobs(repository, blob, MAX_MODULE_BYTES)
        if content is not None and hashlib.sha256(content).hexdigest() == ref.sha256:
            copy = repository / "checked.safetensors"
            copy.write_bytes(content)
            read_module_header(copy, str(path))
            return path, content
    why = (
        f"is not the one it means, or has more than {MAX_MODULE_BYTES // 2**20} MiB"
        if candidates
        else "is not in the repository"
    )
    raise ProfileError(f"its module {ref.file} {why}")


def _list_tree(
    repository: Path, commit: str, suffix: str = ".yaml"
) -> Iterator[tuple[str, str, str]]:
    """Yield (mode, object id, path) of each file under profiles/ whose path ends in `suffix`.

    Every symlink and submodule there is included, whatever its name.

    Raises: ProfileError if there are more than MAX_FILES files.
    """
    listing = run_git(["ls-tree", "-r", "-z", "--full-tree", commit, "--", "profiles/"], repository)
    entries = listing.split(b"\0")[:-1]
    if len(entries) > MAX_FILES:
        raise ProfileError(
            f"the repository has more than {MAX_FILES} files under profiles/; ask its owner to "
            "split it"
        )
    for entry in entries:
        header, _, path = entry.partition(b"\t")
        mode, kind, oid = header.decode("ascii").split()
        if path.endswith(suffix.encode()) or kind == "commit" or mode == "120000":
            yield mode, oid, make_printable(path.decode("utf-8", "replace"), 300)


def _read_blobs(
    repository: Path, blobs: dict[str, str], max_bytes: int = MAX_BYTES
) -> Iterator[tuple[str, bytes | None]]:
    """Yield (path, bytes) of each blob; None instead of bytes if it exceeds `max_bytes`."""
    checks = run_git(
        ["cat-file", "--batch-check=%(objectsize)"], repository, _blob_request(blobs)
    ).split(b"\n")
    # For a blob that the fetch left out, git prints `missing` as the size.
    readable = {
        name: blobs[name]
        for name, size in zip(blobs, checks, strict=False)
        if size.isdigit() and int(size) <= max_bytes
    }
    yield from ((name, None) for name in blobs if name not in readable)
    stream = BytesIO(
        run_git(["cat-file", "--batch=%(objectsize)"], repository, _blob_request(readable))
    )
    for name in readable:
        content = stream.read(int(stream.readline()))
        stream.readline()
        yield name, content


def _blob_request(blobs: dict[str, str]) -> bytes:
    return "".join(f"{oid}\n" for oid in blobs.values()).encode("ascii")


def _folder_name(url: str) -> str:
    """Return a readable folder name that is unique to the URL."""
    readable = (
        re.sub(r"[^A-Za-z0-9.]+", "-", url.partition("://")[2])
        .strip("-.")
        .removesuffix(".git")[:80]
    )
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _replace_folder(folder: Path, files: dict[Path, bytes], source: dict[str, str | None]) -> None:
    """Put the files and source.json at `folder`; a reader sees the old folder or the new one.

    Raises: ProfileError if the user's data folder cannot be written.
    """
    try:
        with new_folder(folder, replace=True) as fresh:
            for path, content in files.items():
                save_file(fresh / path, content, ProfileError)
            save_file(fresh / "source.json", json.dumps(source, indent=1) + "\n", ProfileError)
    except OSError as error:
        raise ProfileError(
            f"cannot write {folder}: {error.strerror or error}; XDG_DATA_HOME chooses another place"
        ) from error
