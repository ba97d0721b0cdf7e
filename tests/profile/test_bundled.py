"""The profiles that come along. Those of the package are for the embedded model: retraining that
voids them, so tune them again. Those of the checkout are masks that others published, which nobody
has measured here."""

from __future__ import annotations

from pathlib import Path

import pytest

import skipsearch
from skipsearch.models import load_adapter
from skipsearch.models.loading.aliases import ALIASES
from skipsearch.profile import dump_profile, load_profile
from skipsearch.profile.compatibility import MachineFacts, ModelFacts
from skipsearch.profile.find import find_profile
from skipsearch.profile.import_ import import_skip_sets
from skipsearch.profile.paths import PATH_VARIABLE, explain_misplaced, profile_path
from skipsearch.profile.validate import validate_paths
from skipsearch.tasks import load_task

ROOT = Path(__file__).parents[2]
SHARED = sorted((ROOT / "profiles").rglob("*.yaml"))
MEASURED = [path for path in SHARED if path.parents[1].name.startswith(("SmolLM2", "qwen2.5"))]
PUBLISHED = [path for path in SHARED if path not in MEASURED]
PUBLISHED_FILES = ROOT.parent / "shared" / "data"
BUNDLED = sorted((Path(skipsearch.__file__).parent / "demo" / "profiles").rglob("*.yaml"))
bundled = pytest.mark.parametrize("path", BUNDLED, ids=lambda p: f"{p.parent.name}/{p.stem}")


def test_there_is_one_for_each_task_that_needs_no_network() -> None:
    assert {path.parent.name for path in BUNDLED} == {"pycode", "prose"}


@bundled
def test_it_is_for_the_embedded_model_as_it_is_now(path: Path) -> None:
    profile, spec = load_profile(path), load_adapter("demo").spec
    found = (profile.model.id, profile.model.config_sha256, profile.model.weights_sha256)
    assert found == ("demo", spec.config_sha256, spec.weights_sha256), (
        f"the embedded model is another one now: tune {path} again"
    )


@bundled
def test_it_was_tuned_from_a_clean_commit_and_found_lossless(path: Path) -> None:
    profile = load_profile(path)
    assert profile.provenance is not None
    assert profile.measured is not None
    assert profile.provenance.commit
    assert "dirty" not in profile.provenance.commit
    assert (
        profile.measured.lossless.identical
        == profile.measured.lossless.prompts
        == profile.measured.prompts
    )
    assert explain_misplaced(path, profile) is None
    assert profile.task.version == load_task(profile.task.name).version


@pytest.mark.parametrize("path", MEASURED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_profile_of_a_pretrained_model_was_measured_and_found_lossless(path: Path) -> None:
    profile = load_profile(path)
    assert profile.verdict == "speculate"
    assert profile.measured is not None
    greedy = profile.task.sampling.temperature == 0
    compared = profile.measured.prompts if greedy else 0  # sampled texts differ by chance
    assert profile.measured.lossless.identical == compared
    assert path.read_text() == dump_profile(profile)


# --- masks that others published


def test_published_masks_are_of_this_version_unmeasured_and_where_they_belong() -> None:
    checked = validate_paths([ROOT / "profiles"])
    assert [one.error for one in checked] == [None] * len(SHARED)
    for path in PUBLISHED:
        profile = load_profile(path)
        assert path.read_text() == dump_profile(profile), (
            "imported anew, or migrated, it would be another text"
        )
        assert (profile.verdict, profile.provenance.searcher, profile.recipe.shape) == (
            "unmeasured",
            "import",
            "skip",
        )
        assert 0.3 < profile.mask.n_skipped / (2 * profile.model.n_layers) < 0.6


@pytest.mark.parametrize(
    ("published", "count", "task"),
    [("dilab-zju/self-speculative-decoding", 4, "any"), ("hemingkx/SWIFT", 5, None)],
)
def test_each_says_who_published_it(published: str, count: int, task: str | None) -> None:
    """Draft & Verify's are for a model, SWIFT's for a model and a task, so that no two claim one
    place.
    """
    found = [load_profile(path) for path in PUBLISHED]
    theirs = [
        profile
        for profile in found
        if f"github.com/{published} skip_layers.json, " in str(profile.provenance.source)
    ]
    assert len(theirs) == count
    assert len({profile_path(profile) for profile in found}) == len(found)
    assert all((profile.task.name == "any") == (task == "any") for profile in theirs)


@pytest.mark.skipif(
    not PUBLISHED_FILES.is_dir(), reason="the published files are not beside the checkout"
)
@pytest.mark.parametrize("name", ["draft_and_verify", "swift"])
def test_they_are_what_the_published_files_say(name: str) -> None:
    for profile in import_skip_sets(PUBLISHED_FILES / f"skip_layers_{name}.json"):
        assert load_profile(ROOT / profile_path(profile)) == profile


@pytest.mark.parametrize(("task", "found_for"), [("cnndm", "cnndm"), ("pycode", "any")])
def test_a_checkout_has_something_for_llama_2_13b_on_the_first_day(
    task: str, found_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    model = ModelFacts(
        id=ALIASES["llama-2-13b"],
        family="llama",
        n_layers=40,
        revision="main",
        config_sha256="a" * 64,
        weights_sha256="b" * 64,
        dtype="bfloat16",
    )
    found = find_profile(model, MachineFacts(kind="cuda", name="NVIDIA H100"), task)
    assert found.profile is not None
    assert (found.profile.task.name, found.profile.recipe.shape) == (found_for, "skip")
    assert found.path == ROOT / profile_path(found.profile)
    assert any("never measured, so its speed is unknown" in warning for warning in found.warnings)
