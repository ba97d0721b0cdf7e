"""The trained drafts that come with the embedded model: small, for these very weights, and better than the masks without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.lasting import thorough

import skipsearch
from skipsearch.decoding import Decoder
from skipsearch.engine import load_model
from skipsearch.evaluation.prompts import workload
from skipsearch.evaluation.replay import Replay
from skipsearch.evaluation.trained import trained_draft
from skipsearch.exits import DraftPolicy
from skipsearch.modules.files import modules_in, read_header, reference
from skipsearch.recipe import Recipe
from skipsearch.tasks import load_task

DEMO = Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo"
MODULES = [*modules_in(DEMO / "modules"), *modules_in(DEMO / "papers")]   # what is used; what may be tried


def test_they_take_less_than_five_megabytes_together() -> None:
    assert sum(path.stat().st_size for path in MODULES) < 5_000_000


@pytest.mark.parametrize("path", [*MODULES[:1], *thorough(*MODULES[1:])], ids=lambda path: path.stem)
def test_each_fits_the_embedded_model_says_where_it_comes_from_and_drafts_losslessly(path: Path) -> None:
    model = load_model("demo", "cpu", "float32", engine="lean")
    card = read_header(path).card
    assert card.base.weights_sha256 == model.spec.weights_sha256
    assert "permissive" in card.trained.licence
    draft = trained_draft(model, reference(path, path.name), [path.parent])
    task = load_task("pycode")
    prompts = workload(model, task, task.calibration[:6]).prompts
    replay = Replay(model, prompts, 24, 6)
    assert draft.alpha(replay) > replay.acceptance(card.mask), "right more often than the mask without it"
    decoder, plain = Decoder(model, Recipe((draft.spec(DraftPolicy(4)),)), modules=[path.parent]), Decoder(model)
    found = decoder.generate(prompts[0], 24)
    assert found.tokens == plain.generate(prompts[0], 24).tokens
    assert found.stats.accepted > 0
