"""Write a profile's draft to a folder that other engines load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from skipsearch.core.files import new_folder
from skipsearch.errors import ExportError
from skipsearch.export.checkpoint import Checkpoint, open_checkpoint
from skipsearch.export.exportable import extract_exportable
from skipsearch.export.hf_checkpoint import convert_to_hf
from skipsearch.export.readme import render_readme
from skipsearch.export.tensor_copy import copy_weights
from skipsearch.profile import Profile
from skipsearch.profile.compatibility import compatibility_warnings

# Files of a model that its draft also needs: tokenizer, generation settings, licence.
COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)


def export_draft(
    profile: Profile,
    model: str,
    out: str | Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write the skip drafter of `profile` to the new folder `out`; return warnings.

    The folder is a checkpoint of whole layers, whose weights are copied as they are stored.
    model: as `load_model` takes it.
    out: is written completely or not at all, even if the process is interrupted.
    progress(done, total): bytes of weights.

    Raises: ExportError; ModelError if the model cannot be found; ProfileError if the profile is
    for another architecture.
    """
    target = Path(out)
    _require_free(target)
    draft = extract_exportable(profile)
    source = open_checkpoint(model)
    warnings = compatibility_warnings(
        profile, source.model_facts(hash_weights=profile.model.weights_sha256 is not None)
    )
    if profile.verdict == "plain":
        warnings.append(
            "nothing beat plain decoding where this profile was made; what is exported is the "
            "draft that came closest"
        )
    warnings += [
        f"{drafter.kind} is left out, since no checkpoint can hold it: "
        f"{target.name}/README.md says more"
        for drafter in draft.left_out
    ]
    if not draft.skip.reading.is_everything:
        warnings.append(
            f"the exported draft has all weights and tokens of the sub-layers that it keeps: "
            f"{draft.skip.reading} is left out, so it is slower than the profile says"
        )
    conversion = convert_to_hf(source, draft.mask)
    with _write_folder(target) as folder:
        (folder / "config.json").write_text(
            json.dumps(conversion.config, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        copy_weights(source.weights, conversion.rename_tensor, folder, progress)
        for path in _companion_files(source):
            shutil.copyfile(path, folder / path.name)
        (folder / "README.md").write_text(
            render_readme(profile, draft, source, conversion, target.name), "utf-8"
        )
    return warnings


def _companion_files(source: Checkpoint) -> Iterator[Path]:
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in COPIED_FILES):
            yield path


def _require_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ExportError(
            f"{target} exists already, and an export replaces nothing: choose another --out, or "
            "remove it"
        )


@contextmanager
def _write_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes `target` at the end, as `core.files.new_folder` does.

    Raises: ExportError if nothing can be written there.
    """
    try:
        with new_folder(target, replace=False) as folder:
            yield folder
            _require_free(target)  # another process may have created it meanwhile
    except OSError as error:
        raise ExportError(
            f"cannot write {target}: {error.strerror or error}; choose another --out"
        ) from error
