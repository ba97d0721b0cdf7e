"""From a model's name to a folder on this machine: `demo`, an alias, a Hub id or a folder."""

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
from skipsearch.models.names import ALIASES

DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

# Weights of other frameworks, or of the same model in another layout, can lie beside the ones that are read.
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
PICKLED = "pytorch_model*.bin"   # fetched only where there is no safetensors
UNWANTED = ["*/*", "consolidated*"]


def locate(name: str, *, weights: bool = True) -> tuple[Path, str, str | None]:
    """(folder with the files, model id, revision) of a name; downloads from the Hub where it must. Raises: ModelError.

    weights False: they are not asked for, and not downloaded.
    """
    if not name.strip():
        raise ModelError("the model name is empty; use demo, a short name (`skipsearch list models`), a Hub id or a folder")
    if name == "demo":
        return DEMO_FOLDER, "demo", None
    try:
        folder = Path(name).expanduser()
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:  # a name too long for a file, somebody else's folder, no such user
        raise ModelError(f"{name[:100]!r} can be no folder ({error.strerror if isinstance(error, OSError) else error}); check the path, or "
                         "give a Hub id (org/name[@revision])") from None
    if folder.is_dir():
        return folder, folder.resolve().name, None
    if folder.exists():
        raise ModelError(f"{name} is a file; give the folder that holds config.json and the weights")
    if name.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {name}; check the path, or give a Hub id (org/name[@revision])")
    short, _, revision = name.partition("@")
    repo = ALIASES.get(short.lower(), short)
    if not HUB_ID.fullmatch(repo):
        near = get_close_matches(short.lower(), ["demo", *ALIASES], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ModelError(f"there is no model called {name!r}; {hint}`skipsearch list models` shows the short names, a Hub id has "
                         "the form org/name[@revision], and no folder has this name")
    return download(repo, revision or None, weights), repo, revision or None


def download(repo: str, revision: str | None, weights: bool) -> Path:
    """The folder of a model of the Hub, fetched where the cache does not have it. Raises: ModelError."""
    from huggingface_hub import errors, snapshot_download

    incomplete = getattr(errors, "IncompleteSnapshotError", ())  # newer than the oldest huggingface_hub that we allow
    try:
        with _bars_on_a_terminal_alone():
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=WANTED,
                                            ignore_patterns=UNWANTED if weights else [*UNWANTED, "*.safetensors"]))
            if weights and not any(folder.glob("*.safetensors")):   # Vicuna, and others of before safetensors
                folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*WANTED, PICKLED], ignore_patterns=UNWANTED))
            return folder
    except errors.GatedRepoError:
        raise ModelError(f"{repo} is gated: accept its licence on its Hub page, then log in with `hf auth login` as that "
                         "user") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision!r}; look up its branches and tags on its Hub page") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"the Hub has no model {repo!r}, or it is private, and no folder has this name: check the spelling, "
                         "or log in with `hf auth login`") from None
    except incomplete:
        raise ModelError(f"{repo} is only half downloaded and the Hub cannot be reached: connect, and the same command fetches "
                         "the rest") from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(f"{repo} is not in the local cache and the Hub cannot be reached: connect once to download it, "
                         "or give a folder that has it") from None
    except errors.HFValidationError:
        raise ModelError(f"{repo!r} is not a name that the Hub can have; a Hub id has the form org/name[@revision]") from None
    except Exception as error:  # the HTTP library's own errors pass through here, and which library that is has changed before
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"the disk is too full for {repo}: free some space, or set HF_HOME to a larger disk") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ModelError(f"downloading {repo} failed ({reason[:200]}): try again, or give a folder that has it") from None


@contextmanager
def _bars_on_a_terminal_alone() -> Iterator[None]:
    """A download shows its progress to people; its retries and warnings come back as the one sentence of what failed."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    verbosity, hide = logging.get_verbosity(), not sys.stderr.isatty() and not are_progress_bars_disabled()
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
