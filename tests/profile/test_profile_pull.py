"""`profile pull` against real local repositories: a friendly one, and one that tries everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from profile_samples import plain, speculate, unmeasured

from skipsearch.errors import ProfileError
from skipsearch.profile import dump_profile, git_command, load_profile
from skipsearch.profile.paths import profile_path, user_folder
from skipsearch.profile.pull import pull_repository, split_address

GOOD = dump_profile(speculate()).encode()
GOOD_PATH = profile_path(speculate()).as_posix()


Files = dict[str, tuple[str, bytes | str]]  # path -> mode, and content or the hash of an object


class Repository:
    """A bare repository whose trees are written by hand, so that they can hold what `git add` would
    refuse.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"
        self.git("init", "--quiet", "--bare", "--initial-branch=main", str(folder), inside=False)

    def git(self, *arguments: str, stdin: bytes = b"", inside: bool = True) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        where = ["-C", str(self.folder)] if inside else []
        done = subprocess.run(
            ["git", *where, *identity, *arguments], input=stdin, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    def tree(self, files: Files) -> str:
        """The hash of a tree with these files, its folders made as needed."""
        entries, folders = [], dict[str, Files]()
        for path, (mode, content) in files.items():
            first, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(first, {})[rest] = (mode, content)
            else:
                oid = (
                    content
                    if isinstance(content, str)
                    else self.git("hash-object", "-w", "--stdin", stdin=content)
                )
                entries.append(f"{mode} {'commit' if mode == '160000' else 'blob'} {oid}\t{first}")
        entries += [f"040000 tree {self.tree(inner)}\t{name}" for name, inner in folders.items()]
        return self.git(
            "mktree", "--missing", "-z", stdin="".join(f"{entry}\0" for entry in entries).encode()
        )

    def commit(self, files: Files, branch: str = "main", sign: bool = False) -> str:
        commit = self.git("commit-tree", *(["-S"] if sign else []), "-m", "x", self.tree(files))
        self.git("update-ref", f"refs/heads/{branch}", commit)
        return commit


@pytest.fixture(autouse=True)
def _own_user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository.git")


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_pulling_keeps_valid_profiles_and_records_the_commit(repository: Repository) -> None:
    commit = repository.commit(
        {
            GOOD_PATH: ("100644", GOOD),
            "README.md": ("100644", b"hello"),
            ".ci.yaml": ("100644", b"a: 1"),
        }
    )
    pulled = pull_repository(repository.url)
    assert (pulled.commit, pulled.ref, pulled.rejections) == (commit, "HEAD", ())
    assert files_below(pulled.folder) == {GOOD_PATH, "source.json"}
    assert (pulled.folder / GOOD_PATH).read_bytes() == GOOD
    source = json.loads((pulled.folder / "source.json").read_text())
    assert (source["url"], source["commit"]) == (repository.url, commit)


def test_pulling_again_replaces_what_was_pulled_before(repository: Repository) -> None:
    repository.commit({GOOD_PATH: ("100644", GOOD)})
    first = pull_repository(repository.url)
    other = profile_path(unmeasured()).as_posix()
    repository.commit({other: ("100644", dump_profile(unmeasured()).encode())})
    second = pull_repository(repository.url)
    assert first.folder == second.folder
    assert files_below(second.folder) == {other, "source.json"}
    assert os.listdir(second.folder.parent) == [second.folder.name]


def test_a_ref_chooses_branch_tag_or_commit(repository: Repository) -> None:
    old = repository.commit({GOOD_PATH: ("100644", GOOD)})
    repository.git("tag", "v1", old)
    new_text = dump_profile(plain()).encode()
    new = repository.commit({GOOD_PATH: ("100644", new_text)}, branch="feature/plain")
    for ref, commit in (("v1", old), ("feature/plain", new), (old, old)):
        assert pull_repository(f"{repository.url}@{ref}").commit == commit
    with pytest.raises(ProfileError, match=r"git fetch failed: .*nowhere.*check the address"):
        pull_repository(f"{repository.url}@nowhere")


def test_a_failed_pull_leaves_the_earlier_one(repository: Repository) -> None:
    repository.commit({GOOD_PATH: ("100644", GOOD)})
    pulled = pull_repository(repository.url)
    repository.commit({GOOD_PATH: ("100644", b"schema_version: 99\n")})
    with pytest.raises(ProfileError, match=r"holds no valid profile at .*update skipsearch"):
        pull_repository(repository.url)
    assert load_profile(pulled.folder / GOOD_PATH) == speculate()


@pytest.mark.parametrize(
    "filtered", [True, False], ids=["server filters large blobs", "server sends everything"]
)
def test_hostile_content_is_left_behind_and_named(
    repository: Repository, tmp_path: Path, filtered: bool
) -> None:
    repository.git("config", "uploadpack.allowFilter", str(filtered).lower())
    secret = tmp_path / "secret.yaml"
    secret.write_bytes(GOOD)
    repository.commit(
        {
            GOOD_PATH: ("100644", GOOD),
            "profiles/link.yaml": ("120000", str(secret).encode()),
            "profiles/demo/folder": ("120000", b"/etc"),
            "profiles/module": ("160000", "1" * 40),
            ".gitmodules": (
                "100644",
                b'[submodule "m"]\n\tpath = profiles/module\n\turl = file:///etc\n',
            ),
            ".gitattributes": ("100644", b"*.yaml filter=lfs\n"),
            "profiles/../../escape.yaml": ("100644", GOOD),
            "profiles/.git/hooks/post-checkout.yaml": ("100755", GOOD),
            "profiles/demo/lfs.yaml": (
                "100644",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            ),
            "profiles/demo/bomb.yaml": ("100644", b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n"),
            "profiles/demo/large.yaml": ("100644", b"# " + b"x" * 200_000),
            "profiles/demo/misplaced.yaml": ("100644", GOOD),
            "profiles/demo/\x1b[31m.yaml": ("100644", b"a: 1"),
            "hooks/post-checkout": ("100755", f"#!/bin/sh\ntouch {tmp_path}/ran\n".encode()),
        }
    )
    for hook in ("post-checkout", "post-merge", "reference-transaction", "pre-receive"):
        path = repository.folder / "hooks" / hook
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        path.chmod(0o755)
    pulled = pull_repository(repository.url)
    assert files_below(user_folder()) == {
        f"pulled/{pulled.folder.name}/{name}" for name in (GOOD_PATH, "source.json")
    }
    told = "\n".join(pulled.rejections)
    for name, why in [
        ("link.yaml", "symbolic link"),
        ("folder", "symbolic link"),
        ("module", "submodule"),
        ("lfs.yaml", "Git LFS"),
        ("../../escape.yaml", "belongs at"),
        ("post-checkout.yaml", "belongs at"),
        ("bomb.yaml", "anchors"),
        ("large.yaml", "larger than 128 KiB"),
        ("misplaced.yaml", "belongs at"),
        ("?[31m.yaml", "schema_version"),
    ]:
        assert any(name in line and why in line for line in pulled.rejections), (name, told)
    assert len(pulled.rejections) == 10
    assert told.replace("\n", "").isprintable()
    assert not (tmp_path / "ran").exists()


def test_a_repository_that_sends_too_much_is_cut_off(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_command, "MAX_FILE_BYTES", 1024 * 1024)
    repository.commit(
        {GOOD_PATH: ("100644", GOOD), "huge.bin": ("100644", os.urandom(3 * 1024 * 1024))}
    )
    with pytest.raises(ProfileError, match="sends more than 1 MiB"):
        pull_repository(repository.url)
    assert not user_folder().exists()


def test_a_tree_that_unfolds_without_end_is_cut_off(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_command, "MAX_FILE_BYTES", 1024 * 1024)
    tree = repository.tree({"x.yaml": ("100644", GOOD)})
    for _ in range(6):  # ten times the files for each level: a million
        tree = repository.git(
            "mktree", "-z", stdin=b"".join(f"040000 tree {tree}\t{i}\0".encode() for i in range(10))
        )
    tree = repository.git("mktree", "-z", stdin=f"040000 tree {tree}\tprofiles\0".encode())
    repository.git("update-ref", "refs/heads/main", repository.git("commit-tree", "-m", "x", tree))
    with pytest.raises(ProfileError, match="sends more than 1 MiB"):
        pull_repository(repository.url)


@pytest.mark.slow
def test_a_file_of_one_gigabyte_is_left_behind(repository: Repository, tmp_path: Path) -> None:
    with open(tmp_path / "zeros", "wb") as file:
        file.truncate(1024**3)
    zeros = repository.git(
        "-c", "core.bigFileThreshold=1m", "hash-object", "-w", str(tmp_path / "zeros")
    )
    repository.commit({GOOD_PATH: ("100644", GOOD), "profiles/zeros.yaml": ("100644", zeros)})
    pulled = pull_repository(repository.url)
    assert files_below(pulled.folder) == {GOOD_PATH, "source.json"}
    assert "larger than 128 KiB" in pulled.rejections[0]


def test_a_deadline_ends_a_server_that_stalls(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit({GOOD_PATH: ("100644", GOOD)})
    monkeypatch.setattr(git_command, "TIMEOUT_S", 0)
    with pytest.raises(ProfileError, match="took longer than 0 seconds"):
        pull_repository(repository.url)


def test_without_git_the_way_out_is_told(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProfileError, match="git is not installed"):
        pull_repository(repository.url)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("https://host/o/r", ("https://host/o/r", "HEAD")),
        ("https://host:8080/o/r@v1.0", ("https://host:8080/o/r", "v1.0")),
        ("https://host/@user/r", ("https://host/@user/r", "HEAD")),
        ("ssh://git@host/o/r.git@feature/x", ("ssh://git@host/o/r.git", "feature/x")),
        ("file:///srv/r", ("file:///srv/r", "HEAD")),
        ("file:///srv/a@b/r@HEAD", ("file:///srv/a@b/r", "HEAD")),
    ],
)
def test_an_address_is_a_url_and_perhaps_a_ref(address: str, parts: tuple[str, str]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("http://host/o/r", "no address of a profile repository"),
        ("git@host:o/r", "no address"),
        ("/srv/r", "no address"),
        ("ext::sh -c id", "no address"),
        ("https://host", "no address"),
        ("https://host/a b", "no address"),
        ("https://host/a\nb", "no address"),
        ("https://token@host/o/r", "password or token"),
        ("ssh://user:password@host/o/r", "password or token"),
        ("ssh://-oProxyCommand=id/r", "is no host"),
        ("ssh://-oProxyCommand=id@host/r", "password or token"),
        ("file://host/r", "is no host"),
        ("https://host/r@--upload-pack=id", "no branch, tag or commit"),
        ("https://host/r@a..b", "no branch, tag or commit"),
        ("https://host/r@+a:b", "no branch, tag or commit"),
    ],
)
def test_an_address_that_git_could_misread_is_refused(address: str, rule: str) -> None:
    with pytest.raises(ProfileError, match=rule):
        split_address(address)


# --- signatures


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key that git signs with, and a configuration that trusts it."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen, which signs and verifies, is not installed")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (tmp_path / "trusted").write_text(f"a@b {key.with_suffix('.pub').read_text()}")
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[gpg]\n\tformat = ssh\n[user]\n\tsigningkey = {key}\n[gpg "ssh"]\n\tallowedSignersFile = '
        f"{tmp_path}/trusted\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    return tmp_path


@pytest.mark.parametrize("what", ["tag", "commit"])
def test_a_good_signature_is_recorded(what: str, repository: Repository, signer: Path) -> None:
    commit = repository.commit({GOOD_PATH: ("100644", GOOD)}, sign=what == "commit")
    if what == "tag":
        repository.git("tag", "--sign", "--message=x", "v1", commit)
    pulled = pull_repository(
        f"{repository.url}@v1" if what == "tag" else repository.url, require_signature=True
    )
    assert (pulled.commit, pulled.signature) == (commit, f"verify-{what}")
    assert json.loads((pulled.folder / "source.json").read_text())["signature"] == f"verify-{what}"


def test_without_a_good_signature_nothing_is_kept(repository: Repository, signer: Path) -> None:
    unsigned = repository.commit({GOOD_PATH: ("100644", GOOD)})
    repository.git("tag", "--annotate", "--message=x", "v0", unsigned)
    for ref in ("main", "v0", unsigned):
        with pytest.raises(
            ProfileError,
            match=r"git verify-(tag|commit) failed: .*; make its signer's key known to git, or "
            r"pull without",
        ):
            pull_repository(f"{repository.url}@{ref}", require_signature=True)
    repository.commit({GOOD_PATH: ("100644", GOOD)}, sign=True)
    (signer / "trusted").write_text("")
    with pytest.raises(ProfileError, match=r"git verify-commit failed: No principal matched"):
        pull_repository(repository.url, require_signature=True)
    assert not user_folder().exists()
    assert pull_repository(repository.url).signature is None


def test_a_commit_that_was_changed_after_it_was_signed_is_refused(
    repository: Repository, signer: Path
) -> None:
    commit = repository.commit({GOOD_PATH: ("100644", GOOD)}, sign=True)
    forged = repository.git("cat-file", "commit", commit).replace("\n\nx", "\n\ny") + "\n"
    oid = repository.git("hash-object", "-t", "commit", "-w", "--stdin", stdin=forged.encode())
    repository.git("update-ref", "refs/heads/main", oid)
    with pytest.raises(ProfileError, match="git verify-commit failed"):
        pull_repository(repository.url, require_signature=True)
