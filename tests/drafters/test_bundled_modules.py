"""The trained drafts that come with the embedded model: small, for these very weights, and better
than the masks without them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.marks import thorough

import skipsearch
from skipsearch.core.reading import READ_ALL
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.trained.module_files import (
    list_modules,
    make_reference,
    read_module_header,
)
from skipsearch.engine import load_model
from skipsearch.replay.replay import Replay
from skipsearch.replay.trained_replay import load_trained_draft
from skipsearch.replay.workload import make_workload
from skipsearch.tasks import load_task

DEMO = Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo"
MODULES = [
    *list_modules(DEMO / "modules"),
    *list_modules(DEMO / "papers"),
]  # what is used; what may be tried


def test_they_take_less_than_five_megabytes_together() -> None:
    assert sum(path.stat().st_size for path in MODULES) < 5_000_000


@pytest.mark.parametrize(
    "path", [*MODULES[:1], *thorough(*MODULES[1:])], ids=lambda path: path.stem
)
def test_each_fits_the_embedded_model_says_where_it_comes_from_and_drafts_losslessly(
    path: Path,
) -> None:
    model = load_model("demo", "cpu", "float32", engine="lean")
    card = read_module_header(path).card
    assert card.base.weights_sha256 == model.spec.weights_sha256
    assert "permissive" in card.trained.licence
    draft = load_trained_draft(model, make_reference(path, path.name), [path.parent])
    task = load_task("pycode")
    prompts = make_workload(model, task, task.calibration[:6]).prompt_ids
    replay = Replay(model, prompts, 24, 6)
    assert draft.measure_alpha(replay) > replay.measure_acceptance(card.mask), (
        "right more often than the mask without it"
    )
    decoder, plain = (
        Decoder(
            model,
            Recipe((draft.make_spec(DraftPolicy(4), READ_ALL),)),
            module_folders=[path.parent],
        ),
        Decoder(model),
    )
    found = decoder.generate(prompts[0], 24)
    assert found.tokens == plain.generate(prompts[0], 24).tokens
    assert found.stats.accepted > 0
