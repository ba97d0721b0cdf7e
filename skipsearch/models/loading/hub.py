"""Find the folder of a model by its name (`demo`, an alias, a Hub id or a folder), and download
from the Hub.
"""

from __future__ import annotations

import errno
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from skipsearch.errors import ModelError
from skipsearch.models.loading.aliases import ALIASES
from skipsearch.models.loading.gguf_file import list_parts

DEMO_FOLDER = Path(__file__).parents[2] / "demo" / "model"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILE = re.compile(rf"(?P<repo>{HUB_ID.pattern})(@(?P<revision>[^:]+))?:(?P<format>[\w.-]+)")

# A repository may also hold the weights for other frameworks, or in another layout.
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
PICKLE_PATTERN = "pytorch_model*.bin"  # downloaded only if there are no safetensors
IGNORE_PATTERNS = ["*/*", "consolidated*"]


def resolve_model(name: str, *, weights: bool = True) -> tuple[Path, str, str | None]:
    """Return (folder with the files, model id, revision), downloaded from the Hub if necessary.

    weights: whether a download includes the weights. Raises: ModelError.
    """
    if not name.strip():
        raise ModelError(
            "the model name is empty; use demo, a short name (`skipsearch list models`), a Hub id "
            "or a folder"
        )
    if name == "demo":
        return DEMO_FOLDER, "demo", None
    try:
        folder = Path(name).expanduser()
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    # The name is too long for a file, the folder belongs to another user, or `~user` is unknown.
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"{name[:100]!r} can be no folder ({reason}); check the path, or give a Hub id "
            "(org/name[@revision])"
        ) from None
    if folder.is_dir():
        return folder, folder.resolve().name, None
    if folder.exists():
        raise ModelError(
            f"{name} is a file, and no GGUF file; give the folder that holds config.json and the "
            "weights"
        )
    if name.startswith((".", "/", "~")):
        raise ModelError(
            f"there is no folder {name}; check the path, or give a Hub id (org/name[@revision])"
        )
    short, _, revision = name.partition("@")
    repo = ALIASES.get(short.lower(), short)
    if not HUB_ID.fullmatch(repo):
        matches = get_close_matches(short.lower(), ["demo", *ALIASES], n=1)
        hint = f"did you mean {matches[0]}? " if matches else ""
        raise ModelError(
            f"there is no model called {name!r}; {hint}`skipsearch list models` shows the short "
            "names, a Hub id has the form org/name[@revision], and no folder has this name"
        )
    return download_model(repo, revision or None, weights), repo, revision or None


def download_model(repo: str, revision: str | None, weights: bool) -> Path:
    """Return the folder of a Hub model, downloaded if the cache does not have it.

    Raises: ModelError.
    """
    from huggingface_hub import snapshot_download

    def download(allow: list[str], ignore: list[str]) -> Path:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore)
        )

    with _hub_errors_reported(repo, revision):
        if not weights:
            return download(ALLOW_PATTERNS, [*IGNORE_PATTERNS, "*.safetensors"])
        folder = download(ALLOW_PATTERNS, IGNORE_PATTERNS)
        if any(folder.glob("*.safetensors")):
            return folder
        # Vicuna, and other models that are older than safetensors.
        folder = download([*ALLOW_PATTERNS, PICKLE_PATTERN], IGNORE_PATTERNS)
        if any(folder.glob(PICKLE_PATTERN)):
            return folder
        files = _list_gguf_files(repo, revision)
    if files:
        raise ModelError(
            f"{repo} has GGUF files: name one by the end of its name, as in {repo}:Q4_K_M; they "
            f"are {', '.join(files)[:400]}"
        )
    return folder


@cache  # a command asks several times, and each answer takes requests to the Hub
def download_gguf(repo: str, revision: str | None, number_format: str) -> Path:
    """Return the GGUF file of a Hub repository, or the first part of a split one.

    It is downloaded if the cache does not have it. number_format: as files are named by it, such as
    Q4_K_M; upper and lower case are the same. Raises: ModelError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    any_case = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in number_format)
    allow = [
        f"{beginning}{any_case}{ending}.gguf"
        for beginning in ("", "*[-._/]")
        for ending in ("", "-?????-of-?????")
    ]
    ignore = ["*mmproj*"]  # towers for images and sounds
    with _hub_errors_reported(repo, revision):
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore)
        )
        cached = (str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
        chosen = sorted(filter_repo_objects(cached, allow_patterns=allow, ignore_patterns=ignore))
        listed = [] if chosen else _list_gguf_files(repo, revision)
    models = {list_parts(folder / path)[0] for path in chosen}
    if len(models) > 1:
        raise ModelError(
            f"{repo} has {len(models)} models in {number_format}: give more of a name's end, of "
            f"{' or '.join(Path(path).stem for path in chosen[:2])}"
        )
    if not chosen:
        files = ", ".join(listed)[:400] or "none"
        raise ModelError(f"{repo} has no GGUF file in {number_format}; its GGUF files are: {files}")
    return folder / chosen[0]


def _list_gguf_files(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(repo, revision=revision)
    return sorted(path for path in files if path.lower().endswith(".gguf"))


@contextmanager
def _hub_errors_reported(repo: str, revision: str | None) -> Iterator[None]:
    """Raise ModelError, in one sentence, for an error of the Hub's client."""
    from huggingface_hub import errors

    try:
        with _progress_only_on_tty():
            yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: accept its licence on its Hub page, then log in with `hf auth "
            "login` as that user"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"{repo} has no revision {revision!r}; look up its branches and tags on its Hub page"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"the Hub has no model {repo!r}, or it is private, and no folder has this name: check "
            "the spelling, or log in with `hf auth login`"
        ) from None
    except errors.IncompleteSnapshotError:
        raise ModelError(
            f"{repo} is only half downloaded and the Hub cannot be reached: connect, and the same "
            "command fetches the rest"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(
            f"{repo} is not in the local cache and the Hub cannot be reached: connect once to "
            "download it, or give a folder that has it"
        ) from None
    except errors.HFValidationError:
        raise ModelError(
            f"{repo!r} is not a name that the Hub can have; a Hub id has the form "
            "org/name[@revision]"
        ) from None
    except Exception as error:  # errors of the HTTP library that huggingface_hub uses
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk is too full for {repo}: free some space, or set HF_HOME to a larger disk"
            ) from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ModelError(
            f"downloading {repo} failed ({reason[:200]}): try again, or give a folder that has it"
        ) from None


@contextmanager
def _progress_only_on_tty() -> Iterator[None]:
    """Show progress bars only on a terminal, and hide warnings and retries.

    A failure is reported in one sentence by our own error.
    """
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    verbosity = logging.get_verbosity()
    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.set_verbosity_error()
    if hide:
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if hide:
            enable_progress_bars()
