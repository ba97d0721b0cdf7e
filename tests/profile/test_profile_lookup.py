"""Where profiles live, and how `--profile auto` finds the best one and tells how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import plain, speculate, unmeasured

from skipsearch.errors import ProfileError
from skipsearch.profile import Profile, paths, save_profile
from skipsearch.profile.compatibility import MachineFacts, ModelFacts
from skipsearch.profile.find import find_profile, list_profiles
from skipsearch.profile.paths import (
    device_slug,
    explain_misplaced,
    model_folder,
    profile_files,
    profile_path,
    search_folders,
    user_folder,
)

MODEL = ModelFacts(
    id="demo",
    family="llama",
    n_layers=16,
    config_sha256="c0" * 32,
    weights_sha256="ab" * 32,
    dtype="float32",
)
MACHINE = MachineFacts(kind="cuda", name="NVIDIA H200", engine="graph")


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty user folder, no environment, no bundled profiles."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv(paths.PATH_VARIABLE, raising=False)
    (tmp_path / "where I stand").mkdir()
    monkeypatch.chdir(tmp_path / "where I stand")
    monkeypatch.setattr(
        paths, "__file__", str(tmp_path / "site-packages" / "skipsearch" / "profile" / "places.py")
    )


def variant(
    task: str = "pycode",
    device: str = "NVIDIA H200",
    dtype: str = "float32",
    base: Profile | None = None,
    quantization: str | None = None,
) -> Profile:
    data = (base or speculate()).model_dump()
    data["task"]["name"] = task
    data["model"] |= {"dtype": dtype, "quantization": quantization}
    data["hardware"]["name"] = device
    return Profile.model_validate(data)


def imported(task: str = "any") -> Profile:
    data = unmeasured().model_dump() | {
        "model": speculate().model_dump()["model"] | {"dtype": None}
    }
    data["drafters"] = [
        {"kind": "skip", "attn": [1], "mlp": [], "draft_length": 12, "exit": {"kind": "fixed"}}
    ]
    data["task"]["name"] = task
    return Profile.model_validate(data)


def put(folder: Path, *profiles: Profile) -> Path:
    for profile in profiles:
        save_profile(profile, folder / profile_path(profile))
    return folder


def test_a_profile_says_where_it_belongs() -> None:
    assert profile_path(speculate()) == Path("profiles/demo/pycode/nvidia-h200--float32.yaml")
    assert profile_path(unmeasured()) == Path(
        "profiles/meta-llama--Llama-2-13b-hf/any/any--any.yaml"
    )
    assert profile_path(variant(quantization="native-8bit")) == Path(
        "profiles/demo/pycode/nvidia-h200--float32-native-8bit.yaml"
    )


def test_quantised_weights_have_profiles_of_their_own(tmp_path: Path) -> None:
    """Each model takes its own, whichever comes first by name; another's only where there is none,
    and a warning says so.
    """
    plain, quantised = variant(), variant(quantization="native-8bit")
    both = put(tmp_path / "both", plain, quantised)
    eight_bits = replace(MODEL, quantization="native-8bit")
    assert find_profile(eight_bits, MACHINE, "pycode", both).profile == quantised
    assert find_profile(MODEL, MACHINE, "pycode", both).profile == plain
    found = find_profile(eight_bits, MACHINE, "pycode", put(tmp_path / "one", plain))
    assert found.profile == plain
    assert any(
        "measured with quantisation none, used with native-8bit" in warning
        for warning in found.warnings
    )


@pytest.mark.parametrize(
    ("model_id", "folder"),
    [
        ("demo", "demo"),
        ("org/name", "org--name"),
        ("/home/me/models/My Model", "My-Model"),
        ("./tiny", "tiny"),
        ("a/b/c", "c"),
        ("../..", "unknown"),
        ("/", "unknown"),
        ("..", "unknown"),
        (".hidden", "hidden"),
    ],
)
def test_a_models_folder_is_one_safe_name(model_id: str, folder: str) -> None:
    assert model_folder(model_id) == folder


@given(st.text(max_size=200))
def test_no_name_escapes_its_folder(name: str) -> None:
    for slug in (model_folder(name), device_slug(name), device_slug(name, count=2)):
        assert slug
        assert not slug.startswith(".")
        assert slug.isascii()
        assert not set(slug) & set('/\\:*?"<>| ')


def test_several_devices_are_another_device() -> None:
    assert device_slug("NVIDIA H200", 8) == "8x-nvidia-h200"


def test_the_ladder_goes_from_task_to_device_to_dtype_and_then_to_the_task_any(
    tmp_path: Path,
) -> None:
    """Take the best profile away, again and again: the next rung is found, until none is left."""
    best_first = [
        variant(),
        variant(dtype="bfloat16"),
        variant(device="NVIDIA L4"),
        variant(device="NVIDIA L4", dtype="bfloat16"),
        imported("pycode"),
        variant(task="any"),
        variant(task="any", dtype="bfloat16"),
        variant(task="any", device="AMD EPYC"),
        imported("any"),
    ]
    put(tmp_path / "repo", *best_first, variant(task="prose"))
    for profile in best_first:
        found = find_profile(MODEL, MACHINE, "pycode", tmp_path / "repo")
        assert found.profile == profile
        assert found.path == tmp_path / "repo" / profile_path(profile)
        assert str(found.steps[-1]).endswith(f"using {found.path}")
        found.path.unlink()
    found = find_profile(MODEL, MACHINE, "pycode", tmp_path / "repo")
    assert (found.profile, found.path) == (None, None)
    assert [str(rung) for rung in found.steps] == [
        "model demo: in 1 of 2 folders",
        *(
            f"task {task}, {rung}: none"
            for task in ("pycode", "any")
            for rung in (
                "this device, float32",
                "this device, another dtype",
                "another device, float32",
                "another device, another dtype",
                "unmeasured",
            )
        ),
    ]


def test_what_was_found_comes_with_its_warnings(tmp_path: Path) -> None:
    put(tmp_path, variant(device="NVIDIA L4"))
    found = find_profile(MODEL, MACHINE, "pycode", tmp_path)
    assert len(found.warnings) == 1
    assert "measured on NVIDIA L4" in found.warnings[0]


def test_a_plain_verdict_is_found_too(tmp_path: Path) -> None:
    put(tmp_path, plain())
    found = find_profile(MODEL, MACHINE, "pycode", tmp_path)
    assert found.profile is not None
    assert found.profile.verdict == "plain"


def test_on_one_rung_the_earlier_folder_wins_but_a_better_rung_wins_over_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        paths.PATH_VARIABLE, f"{tmp_path / 'first'}:{tmp_path / 'missing'}:{tmp_path / 'second'}"
    )
    pulled = user_folder() / "pulled" / "somebody"
    put(user_folder(), variant())
    put(pulled, variant())
    put(tmp_path / "second", variant())
    put(tmp_path / "first", variant(dtype="bfloat16"))
    put(tmp_path / "named", variant(task="any"))
    for folder in (
        tmp_path / "second",
        user_folder(),
        pulled,
        tmp_path / "first",
        tmp_path / "named",
    ):
        found = find_profile(MODEL, MACHINE, "pycode", tmp_path / "named")
        assert found.path is not None
        assert found.path.is_relative_to(folder)
        found.path.unlink()


def test_a_file_that_does_not_fit_is_passed_by_and_named(tmp_path: Path) -> None:
    put(tmp_path, variant(), variant(task="any"))
    (tmp_path / profile_path(variant())).write_text("schema_version: 99\n")
    found = find_profile(MODEL, MACHINE, "pycode", tmp_path)
    assert found.profile == variant(task="any")
    assert "refused" in found.steps[1].outcome
    assert "update skipsearch" in found.steps[1].outcome
    nothing = find_profile(replace(MODEL, config_sha256="d1" * 32), MACHINE, "pycode", tmp_path)
    assert nothing.profile is None
    assert any("load the model it was made for" in rung.outcome for rung in nothing.steps)


def test_a_model_without_profiles_ends_the_ladder_with_a_plain_answer(tmp_path: Path) -> None:
    found = find_profile(replace(MODEL, id="org/new"), MACHINE, "pycode", tmp_path)
    assert found.profile is None
    assert str(found.steps[0]) == "model org/new: in none of 2 folders"


def test_of_two_that_fit_alike_the_earlier_folders_is_taken_and_the_ladder_says_that_there_were_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    put(first, variant())
    put(second, variant())
    monkeypatch.setenv(paths.PATH_VARIABLE, str(second))
    found = find_profile(MODEL, MACHINE, "pycode", first)
    assert found.path is not None
    assert found.path.is_relative_to(first)
    assert str(found.steps[-1]).endswith("the first of 2 in the order of the folders")


def test_where_no_task_fits_the_answer_names_those_that_there_are(tmp_path: Path) -> None:
    put(tmp_path, variant("pycode"), variant("prose"))
    found = find_profile(MODEL, MACHINE, "pycod", tmp_path)
    assert (found.profile, found.tasks) == (None, ("prose", "pycode"))


def test_where_no_task_is_named_the_only_one_measured_here_comes_before_what_nobody_measured(
    tmp_path: Path,
) -> None:
    """Whoever tunes a model and then says `--profile auto` gets that profile, and not somebody's
    published mask.
    """
    put(tmp_path, imported(), variant("cnndm"), variant("cnndm", device="NVIDIA L4"))
    found = find_profile(MODEL, MACHINE, folder=tmp_path)
    assert found.profile == variant("cnndm")
    assert (
        "this is the profile for cnndm, the only task that was measured on this device"
        in found.warnings[0]
    )
    put(tmp_path, variant("any"))
    assert find_profile(MODEL, MACHINE, folder=tmp_path).profile == variant("any"), (
        "what was measured here for any task comes before it"
    )


def test_where_no_task_is_named_and_two_were_measured_chat_or_the_best_measured_one_is_taken(
    tmp_path: Path,
) -> None:
    few, many = variant("cnndm"), variant("prose")
    assert many.measured is not None
    lossless = many.measured.lossless.model_copy(update={"prompts": 64, "identical": 64})
    many = many.model_copy(
        update={"measured": many.measured.model_copy(update={"prompts": 64, "lossless": lossless})}
    )
    put(tmp_path, few, many)
    found = find_profile(MODEL, MACHINE, folder=tmp_path)
    assert found.profile == many
    assert "the profile for prose" in found.warnings[0]
    put(tmp_path, variant("chat"))
    found = find_profile(MODEL, MACHINE, folder=tmp_path)
    assert found.profile == variant("chat")
    assert "also measured on this device: prose, cnndm" in found.warnings[0]


def test_the_folder_named_by_the_user_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"--profiles .*nowhere is not a folder"):
        find_profile(MODEL, MACHINE, folder=tmp_path / "nowhere")


def test_profiles_of_a_checkout_come_last_but_for_those_of_the_embedded_model(
    tmp_path: Path,
) -> None:
    assert [source.label for source in search_folders()] == ["user"]
    package = tmp_path / "site-packages"
    put(package / "skipsearch" / "demo", variant())
    assert [source.label for source in search_folders()] == ["user", "embedded"]
    assert find_profile(MODEL, MACHINE, "pycode").profile == variant()
    (package / "pyproject.toml").touch()
    assert [source.label for source in search_folders()] == ["user", "this checkout", "embedded"]
    put(package, variant())
    found = find_profile(MODEL, MACHINE, "pycode")
    assert found.path is not None
    assert found.path.is_relative_to(package / "profiles")


def test_listing_shows_sources_and_what_is_no_profile(tmp_path: Path) -> None:
    put(tmp_path, variant(), imported())
    (tmp_path / "profiles/demo/pycode/broken.yaml").write_text("x")
    listed = {entry.path.name: entry for entry in list_profiles(tmp_path)}
    assert set(listed) == {"nvidia-h200--float32.yaml", "any--any.yaml", "broken.yaml"}
    assert listed["broken.yaml"].profile is None
    assert "a profile is a map" in str(listed["broken.yaml"].error)
    assert listed["any--any.yaml"].source.label == str(tmp_path)


def test_the_files_of_a_repository_are_those_under_its_profiles_folder(tmp_path: Path) -> None:
    put(tmp_path, variant(), imported())
    (tmp_path / ".pre-commit-config.yaml").write_text("repos: []")
    assert [path.name for path in profile_files(tmp_path)] == [
        "any--any.yaml",
        "nvidia-h200--float32.yaml",
    ]


def test_a_profile_in_the_wrong_place_is_told_the_right_one(tmp_path: Path) -> None:
    right = tmp_path / profile_path(variant())
    assert explain_misplaced(right, variant()) is None
    assert explain_misplaced(tmp_path / "x.yaml", variant()) is None
    wrong = explain_misplaced(right.with_name("x.yaml"), variant())
    assert wrong is not None
    assert "its content belongs at profiles/demo/pycode/nvidia-h200--float32.yaml" in wrong
