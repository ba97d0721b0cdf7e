"""Find the folder of a model by its name: `demo`, an alias, a Hub id or a folder."""

from __future__ import annotations

import errno
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from skipsearch.errors import ModelError
from skipsearch.models.loading.aliases import ALIASES

DEMO_FOLDER = Path(__file__).parents[2] / "demo" / "model"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

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
    from huggingface_hub import errors, snapshot_download

    def download(allow: list[str], ignore: list[str]) -> Path:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore)
        )

    try:
        with _progress_only_on_tty():
            if not weights:
                return download(ALLOW_PATTERNS, [*IGNORE_PATTERNS, "*.safetensors"])
            folder = download(ALLOW_PATTERNS, IGNORE_PATTERNS)
            # Vicuna, and other models that are older than safetensors.
            if not any(folder.glob("*.safetensors")):
                folder = download([*ALLOW_PATTERNS, PICKLE_PATTERN], IGNORE_PATTERNS)
            return folder
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
