"""Modules and the profiles that name them: placed together, checked together, pulled together."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.modules import SMALL_MASK, make_card, noisy_copies
from helpers.tiny import tiny_model_and_reference
from profile_samples import speculate
from profile_samples import unmeasured as imported
from test_profile_pull import Repository

from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.trained.module_files import make_reference
from skipsearch.drafters.trained.module_weights import save_module
from skipsearch.errors import ExportError, ModuleError, ProfileError
from skipsearch.export.exportable import extract_exportable
from skipsearch.profile import Profile, dump_profile, load_profile, save_profile
from skipsearch.profile.copy_modules import copy_modules, module_problem
from skipsearch.profile.paths import profile_path
from skipsearch.profile.pull import pull_repository
from skipsearch.profile.validate import validate_paths

__all__ = ["Repository"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a module of the small model."""
    model, _ = tiny_model_and_reference()
    folder = tmp_path / "trained"
    folder.mkdir()
    save_module(
        folder / "a.safetensors", make_card(model, SMALL_MASK), noisy_copies(model, SMALL_MASK, 0.1)
    )
    return folder


def profile(source: Path) -> Profile:
    model, _ = tiny_model_and_reference()
    spec = Adapted.from_module(
        SMALL_MASK, 4, Fixed(), make_reference(source / "a.safetensors", "a.safetensors")
    )
    info = imported().model.model_copy(
        update={"id": "small", "family": model.spec.family, "n_layers": SMALL_MASK.n_layers}
    )
    return imported().model_copy(update={"model": info, "drafters": (spec,)})


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("mine/p.yaml", "mine/modules"),
        ("profiles/small/any/any--any.yaml", "profiles/small/modules"),
    ],
)
def test_a_profile_is_written_with_its_module_and_decodes_from_there(
    source: Path, tmp_path: Path, target: str, module: str
) -> None:
    path = tmp_path / target
    placed = copy_modules(profile(source), [source], path)
    save_profile(placed, path)
    [file] = (tmp_path / module).iterdir()
    assert file.read_bytes() == (source / "a.safetensors").read_bytes()
    loaded = load_profile(path)
    assert loaded == placed
    assert loaded.recipe.modules[0].file == f"modules/{file.name}"
    assert [checked.error for checked in validate_paths([path])] == [None]
    model, full = tiny_model_and_reference()
    found = Decoder(model, loaded).generate([5, 17, 40, 3], 12)
    assert found.tokens == full.greedy([5, 17, 40, 3], 12)
    assert found.stats.drafted
    assert copy_modules(loaded, [], path) == loaded, "what is there already stays"


def test_a_profile_whose_module_is_missing_or_another_one_is_refused_with_a_sentence(
    source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "p.yaml"
    save_profile(copy_modules(profile(source), [source], path), path)
    [file] = (tmp_path / "modules").iterdir()
    model, _ = tiny_model_and_reference()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "not the module that was measured" in str(module_problem(load_profile(path)))
    with pytest.raises(ModuleError, match="not the module that was measured"):
        Decoder(model, load_profile(path))
    file.unlink()
    [checked] = validate_paths([path])
    assert "is not there" in str(checked.error)
    with pytest.raises(ModuleError, match="is not there"):
        Decoder(model, load_profile(path))


def test_a_module_for_other_weights_than_the_profile_is_no_valid_pair(
    source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "p.yaml"
    model, _ = tiny_model_and_reference()
    card = make_card(model, SMALL_MASK)
    save_module(
        source / "a.safetensors",
        card.model_copy(
            update={"base": card.base.model_copy(update={"weights_sha256": "aa" * 32})}
        ),
        noisy_copies(model, SMALL_MASK, 0.1),
    )
    mine = profile(source)
    other = mine.model_copy(
        update={"model": mine.model.model_copy(update={"weights_sha256": "bb" * 32})}
    )
    save_profile(copy_modules(other, [source], path), path)
    assert "trained for other weights" in str(module_problem(load_profile(path)))


def test_where_a_profile_lies_is_no_part_of_it(source: Path, tmp_path: Path) -> None:
    mine = profile(source)
    assert mine.located_in(tmp_path) == mine
    assert hash(mine.located_in(tmp_path)) == hash(mine)
    assert mine.module_folders == ()
    assert mine.located_in(tmp_path).module_folders == (tmp_path, tmp_path.parent)
    assert mine != speculate()


def test_an_export_refuses_weights_that_it_would_leave_behind(source: Path) -> None:
    with pytest.raises(ExportError, match="trained weights"):
        extract_exportable(profile(source))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Repository(tmp_path / "repository.git")


def files_of(source: Path) -> dict[str, tuple[str, bytes | str]]:
    mine = profile(source)
    return {
        profile_path(mine).as_posix(): ("100644", dump_profile(mine).encode()),
        "profiles/small/a.safetensors": ("100644", (source / "a.safetensors").read_bytes()),
        "profiles/small/unasked.safetensors": ("100644", b"nobody names this one"),
    }


def test_a_pull_brings_the_modules_that_profiles_name_and_no_others(
    repository: Repository, source: Path
) -> None:
    repository.commit(files_of(source))
    pulled = pull_repository(repository.url)
    assert pulled.rejections == ()
    [path] = [path for path in pulled.accepted_files if path.suffix == ".yaml"]
    assert module_problem(load_profile(path)) is None
    assert not list(pulled.folder.rglob("unasked*"))


@pytest.mark.parametrize(
    ("mode", "content", "reason"),
    [
        ("100644", b"another file", "is not the one it means"),
        ("120000", b"/etc/passwd", "symbolic link, which is not followed"),
        (None, b"", "is not in the repository"),
    ],
)
def test_a_pulled_profile_whose_module_is_not_what_it_says_is_left_behind(
    repository: Repository, source: Path, mode: str | None, content: bytes, reason: str
) -> None:
    files = files_of(source)
    if mode is None:
        del files["profiles/small/a.safetensors"]
    else:
        files["profiles/small/a.safetensors"] = (mode, content)
    repository.commit(files)
    with pytest.raises(ProfileError, match=reason):
        pull_repository(repository.url)
