"""The profiles that come with the package are for the model that comes with it. Retraining that voids them: tune them again."""

from __future__ import annotations

from pathlib import Path

import pytest

import skipsearch
from skipsearch.models import load_model
from skipsearch.profile import load_profile
from skipsearch.profile.places import misplaced
from skipsearch.tasks import load_task

BUNDLED = sorted((Path(skipsearch.__file__).parent / "demo" / "profiles").rglob("*.yaml"))
bundled = pytest.mark.parametrize("path", BUNDLED, ids=lambda p: f"{p.parent.name}/{p.stem}")


def test_there_is_one_for_each_task_that_needs_no_network() -> None:
    assert {path.parent.name for path in BUNDLED} == {"pycode", "prose"}


@bundled
def test_it_is_for_the_embedded_model_as_it_is_now(path: Path) -> None:
    profile, spec = load_profile(path), load_model("demo").spec
    found = (profile.model.id, profile.model.config_sha256, profile.model.weights_sha256)
    assert found == ("demo", spec.config_sha256, spec.weights_sha256), f"the embedded model is another one now: tune {path} again"


@bundled
def test_it_was_tuned_from_a_clean_commit_and_found_lossless(path: Path) -> None:
    profile = load_profile(path)
    assert profile.provenance is not None
    assert profile.measured is not None
    assert profile.provenance.commit
    assert "dirty" not in profile.provenance.commit
    assert profile.measured.lossless.identical == profile.measured.lossless.prompts == profile.measured.prompts
    assert misplaced(path, profile) is None
    assert profile.task.version == load_task(profile.task.name).version
