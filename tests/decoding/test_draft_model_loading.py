"""A decoder loads the draft model that its recipe names, or says in one sentence why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.draft_models import prune_layers
from helpers.gguf_files import write_model
from helpers.tiny import FullModel, tiny_llama

from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.decoding.draft_models import load_draft_model
from skipsearch.drafters.draft_model.loaded_models import provide_draft_model, refer_to_draft_model
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.drafters.exits import make_exit
from skipsearch.errors import ModelError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.profile.model_locations import record_location

PROMPT = (5, 17, 40, 3)


@pytest.fixture
def full() -> Any:
    return tiny_llama().float()


@pytest.fixture
def model(full: Any) -> ModelAdapter:
    return adapt(full)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "small.gguf"
    path.parent.mkdir()
    write_model(prune_layers(tiny_llama(), 3), path, "Q4_0")
    return path


@pytest.fixture(autouse=True)
def own_list_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def recipe_with(file: Path, model: ModelAdapter) -> Recipe:
    """A recipe whose draft model was loaded once, and is in memory no more."""
    draft_model = load_draft_model(str(file), model)
    ref = refer_to_draft_model(draft_model, str(file))
    assert ref.id == file.name
    return Recipe((DraftModel(model=ref, draft_length=4, exit=make_exit("fixed")),))


def check_drafts(decoder: Decoder, full: Any) -> None:
    result = decoder.generate(PROMPT, 20)
    assert result.tokens == FullModel(full).greedy(PROMPT, 20)
    assert 0 < result.stats.accepted < result.stats.drafted
    assert decoder.loop.draft_models[0].spec.quantization == "gguf-q4_0-float-activations"


def test_a_file_is_loaded_from_where_it_was_last(
    model: ModelAdapter, full: Any, file: Path
) -> None:
    recipe = recipe_with(file, model)
    record_location(recipe.draft_models[0].weights_sha256, file)
    check_drafts(Decoder(model, recipe), full)


def test_a_file_that_moved_is_found_in_the_folder_of_the_profile(
    model: ModelAdapter, full: Any, file: Path, tmp_path: Path
) -> None:
    recipe = recipe_with(file, model)
    record_location(recipe.draft_models[0].weights_sha256, file)
    shutil.move(file, tmp_path / file.name)
    with pytest.raises(ModelError, match=r"'small.gguf'.*models/small.gguf, which is not there"):
        Decoder(model, recipe)
    check_drafts(Decoder(model, recipe, module_folders=[tmp_path]), full)


def test_a_file_that_was_never_loaded_here_is_asked_for(model: ModelAdapter, file: Path) -> None:
    with pytest.raises(ModelError, match=r"'small.gguf', and it has not been loaded on this"):
        Decoder(model, recipe_with(file, model))


def test_another_file_in_its_place_is_refused_by_its_hash(
    model: ModelAdapter, file: Path, tmp_path: Path
) -> None:
    recipe = recipe_with(file, model)
    write_model(prune_layers(tiny_llama(), 2), tmp_path / file.name, "Q4_0")
    ref = recipe.draft_models[0]
    with pytest.raises(
        ModelError, match=rf"small.gguf is another model.*{ref.weights_sha256[:12]}"
    ):
        Decoder(model, recipe, module_folders=[tmp_path])


def test_a_model_in_memory_can_be_provided_for_a_reference(
    model: ModelAdapter, full: Any, file: Path
) -> None:
    [spec] = recipe_with(file, model).drafters
    assert spec.draft_model is not None
    in_memory = adapt(prune_layers(tiny_llama(), 3).float())
    provide_draft_model(spec.draft_model, in_memory)
    decoder = Decoder(model, Recipe((spec,)))
    assert decoder.loop.draft_models == [in_memory]
    assert decoder.generate(PROMPT, 12).tokens == FullModel(full).greedy(PROMPT, 12)
    with pytest.raises(ModelError, match=r"small.gguf with 3 layers .* has 2 layers"):
        provide_draft_model(spec.draft_model, adapt(prune_layers(tiny_llama(), 2)))


def test_a_draft_model_with_other_tokens_is_refused(model: ModelAdapter) -> None:
    small = adapt(tiny_llama(vocab=48))
    spec = DraftModel(model=refer_to_draft_model(small), draft_length=4, exit=make_exit("fixed"))
    with pytest.raises(ModelError, match=r"vocabularies have 48 and 64 tokens"):
        Decoder(model, Recipe((spec,)))
