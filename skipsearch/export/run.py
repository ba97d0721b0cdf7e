"""`export`: a profile's draft as a folder that other engines load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from skipsearch.errors import ExportError
from skipsearch.export.custom_generate import CUSTOM_GENERATE, write_custom_generate
from skipsearch.export.draft import carried
from skipsearch.export.readme import readme
from skipsearch.export.source import Source, open_source
from skipsearch.export.weights import copy_weights
from skipsearch.names import resolve
from skipsearch.profile import Profile
from skipsearch.profile.match import check

FORMATS: dict[str, str] = {
    "hf": "skipsearch.export.hf:convert",
    "deci": "skipsearch.export.deci:convert",
    CUSTOM_GENERATE: "skipsearch.export.custom_generate:write_custom_generate",   # no checkpoint: it needs no model
}
# What belongs to a model beside config and weights: its tokenizer, how it generates, and the terms it may be passed on under.
KEPT = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model", "chat_template*",
        "generation_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def export(profile: Profile, model: str, format: str, out: str | Path,
           progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Write the skip drafter of `profile` as a checkpoint cut out of `model` at `out`, a new folder; warnings about the two.

    model: as `load_model` takes it. format: `hf` (whole layers) or `deci` (sub-layers), whose weights are copied as they are stored; or
    `custom-generate`, a folder that `model.generate` takes, which holds the whole profile and no weights, and needs no model.
    `out` is whole or is not there, whatever interrupts the work. progress(done, total): bytes of weights.
    Raises: ExportError; ModelError for a model that cannot be found; ProfileError if the profile is for another architecture.
    """
    target = Path(out)
    if format == CUSTOM_GENERATE:
        _require_free(target)
        with _new_folder(target) as folder:
            write_custom_generate(profile, folder, target.name)
        return []
    convert = resolve("export format", format, FORMATS, ExportError)
    _require_free(target)
    draft = carried(profile)
    source = open_source(model)
    warnings = check(profile, source.facts(weights=profile.model.weights_sha256 is not None))
    if profile.verdict == "plain":
        warnings.append("nothing beat plain decoding where this profile was made; what is exported is the draft that came closest")
    warnings += [f"{drafter.kind} stays behind, which no checkpoint can hold: {target.name}/README.md says more"
                 for drafter in draft.behind]
    conversion = convert(source, draft.mask)
    with _new_folder(target) as folder:
        (folder / "config.json").write_text(json.dumps(conversion.config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        copy_weights(source.weights, conversion.rename, folder, progress)
        for path in [*_belongings(source), *conversion.files]:
            shutil.copyfile(path, folder / path.name)
        (folder / "README.md").write_text(readme(profile, draft, source, conversion, target.name), "utf-8")
    return warnings


def _belongings(source: Source) -> Iterator[Path]:
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in KEPT):
            yield path


def _require_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ExportError(f"{target} exists already, and an export replaces nothing: choose another --out, or remove it")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` that becomes it at the end; it is gone if the block fails or is interrupted."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:50]}-") as scratch:
            folder = Path(scratch, "new")
            folder.mkdir()
            yield folder
            _require_free(target)  # it may have come meanwhile
            os.rename(folder, target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}; choose another --out") from error
