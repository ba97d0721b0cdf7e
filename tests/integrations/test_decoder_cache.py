"""What `ss.generate` keeps from one call to the next, and what it lets go of."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decoding.round_counts import counted
from helpers.marks import slow, thorough
from helpers.modules import module_folder, noisy_low_rank_changes, save_adapted, small_module
from helpers.tiny import LAYERS, tiny_llama
from models.every_class import build
from models.tiny import TINY, new_hf_model

import skipsearch as ss
from skipsearch.core.recipe import Recipe
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.drafters.swift.spec import SWIFT
from skipsearch.drafters.trained import module_weights
from skipsearch.errors import ModuleError
from skipsearch.integrations import decoder_cache
from skipsearch.models import adapt
from skipsearch.models.kv_cache import KVCache
from skipsearch.profile import load_profile

IDS = torch.tensor([[5, 17, 40, 3]])
MASK = ss.SkipMask(LAYERS, (1, 3), (2,))
PROFILE = Path(__file__).parents[1] / "profile" / "golden" / "v3_unmeasured.yaml"


def profile_in(where: Path, spec: Adapted) -> Any:
    """An unmeasured profile of the tiny model, beside the file that it names."""
    shutil.copy(module_folder() / spec.module.file, where / spec.module.file)
    found = load_profile(PROFILE)
    told = found.model.model_copy(
        update={
            "id": "llama",
            "family": "llama",
            "n_layers": LAYERS,
            "revision": None,
            "config_sha256": None,
            "weights_sha256": None,
        }
    )
    return found.model_copy(update={"model": told, "drafters": (spec,)}).located_in(where)


@pytest.fixture
def reads() -> Iterator[list[Path]]:
    """Files of trained weights that were read."""
    found: list[Path] = []
    real = module_weights.load_module

    def load(path: Path) -> Any:
        found.append(path)
        return real(path)

    with patch.object(module_weights, "load_module", load):
        yield found


@pytest.fixture
def accepted() -> Iterator[list[int]]:
    """Of each round: how many drafted tokens stood."""
    with counted("accepted") as found:
        yield found


def text(model: Any, profile: Any, **settings: Any) -> list[int]:
    return ss.generate(model, IDS, profile=profile, max_new_tokens=12, **settings)[0].tolist()


def test_trained_weights_are_read_once(tmp_path: Path, reads: list[Path]) -> None:
    model, profile = tiny_llama(), profile_in(tmp_path, small_module(0.1, 4))
    expected = model.generate(IDS, max_new_tokens=12)[0].tolist()
    assert [text(model, profile) for _ in range(3)] == [expected] * 3
    assert text(model, profile_in(tmp_path, small_module(0.1, 4))) == expected, (
        "the same profile, loaded again"
    )
    ss.generate(model, IDS, profile=profile, max_new_tokens=5, do_sample=True)
    ss.attach(model, profile)
    assert model.generate(IDS, max_new_tokens=12)[0].tolist() == expected
    assert len(reads) == 2, "the copied file has another time, and is read for that"
    other = tiny_llama()
    text(other, profile)
    assert len(reads) == 3


def test_a_changed_file_is_noticed(tmp_path: Path, reads: list[Path]) -> None:
    model, profile = tiny_llama(), profile_in(tmp_path, small_module(0.1, 4))
    expected, path = text(model, profile), tmp_path / small_module(0.1, 4).module.file
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ModuleError, match="this is not the module that was measured"):
        text(model, profile)
    path.unlink()
    with pytest.raises(ModuleError, match="is not there"):
        text(model, profile)
    profile_in(tmp_path, small_module(0.1, 4))
    assert text(model, profile) == expected
    assert len(reads) == 2


def test_another_profile_is_another_decoder(accepted: list[int]) -> None:
    model = tiny_llama()
    recipes = [Recipe((Skip.from_mask(MASK, length, make_exit("fixed")),)) for length in (1, 3)]
    drafted = []
    for recipe in (*recipes, *recipes, None):
        accepted.clear()
        text(model, recipe)
        drafted.append(list(accepted))
    assert drafted[:2] == drafted[2:4]
    assert drafted[0] != drafted[1]
    assert not any(drafted[4])
    assert len(decoder_cache._CACHE[model]) == decoder_cache.MAX_PROFILES


def test_another_models_weights_are_another_decoder(tmp_path: Path, accepted: list[int]) -> None:
    """Low-rank changes are added to the model's own weights when the decoder is built; those may
    change afterwards.
    """
    model = tiny_llama()
    adapter = adapt(tiny_llama())
    spec = save_adapted(
        adapter,
        MASK,
        noisy_low_rank_changes(adapter, MASK, 2, 0.1),
        "kept-lora.safetensors",
        rank=2,
    )
    profile = profile_in(tmp_path, spec)
    text(model, profile)
    first = decoder_cache._CACHE[model][0].decoder
    text(model, profile)
    assert decoder_cache._CACHE[model][0].decoder is first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert text(model, profile) == model.generate(IDS, max_new_tokens=12)[0].tolist()
    second = decoder_cache._CACHE[model][0].decoder
    assert second is not first
    model.model.layers[2] = copy.deepcopy(model.model.layers[3])
    model.model.layers[2].self_attn.layer_idx = 2
    assert text(model, profile) == model.generate(IDS, max_new_tokens=12)[0].tolist()
    assert decoder_cache._CACHE[model][0].decoder is not second


def test_what_ends_a_text_is_each_calls_own() -> None:
    model = tiny_llama()
    whole = text(model, MASK)
    third = whole[IDS.shape[1] + 2]
    cut = text(model, MASK, eos_token_id=third, pad_token_id=0)
    assert cut == whole[: whole.index(third, IDS.shape[1]) + 1]
    assert text(model, MASK) == whole


FAMILIES = ["llama", *slow(*(name for name in TINY if name != "llama"))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_nobody_holds_goes_at_once(name: str) -> None:
    _goes(new_hf_model(name))


@pytest.mark.parametrize("family", ["starcoder2", *thorough("lfm2"), *slow("bloom", "gpt_oss")])
def test_a_model_read_from_its_structure_does_too(family: str) -> None:
    _goes(build(family))


def _goes(*models: Any) -> None:
    """Takes the only reference, in a list that it empties."""
    found = list(models)
    del models
    model = found.pop()
    ss.attach(model, ss.SkipMask(model.config.get_text_config().num_hidden_layers, (1,)))
    ss.generate(
        model,
        IDS,
        profile=ss.SkipMask(model.config.get_text_config().num_hidden_layers, (0,)),
        max_new_tokens=6,
    )
    model.generate(IDS, max_new_tokens=6)
    assert len(decoder_cache._CACHE[model]) == 2
    ends, weight = weakref.ref(model), weakref.ref(next(model.parameters()))
    gc.collect()
    gc.disable()
    try:
        del model
        assert ends() is None
        assert weight() is None
    finally:
        gc.enable()


def test_no_kv_stays_behind() -> None:
    model, alive = tiny_llama(), weakref.WeakSet[KVCache]()
    real = KVCache.__init__

    def init(self: KVCache, *arguments: Any) -> None:
        real(self, *arguments)
        alive.add(self)

    with patch.object(KVCache, "__init__", init):
        text(model, MASK)
        ss.generate(model, IDS.repeat(3, 1), profile=MASK, max_new_tokens=6)
        assert list(decoder_cache._CACHE[model])
        gc.collect()
        assert not alive


def test_detach_lets_go_of_everything() -> None:
    model = tiny_llama()
    ss.attach(model, MASK)
    model.generate(IDS, max_new_tokens=6)
    ss.detach(model)
    assert model not in decoder_cache._CACHE


def test_a_model_may_be_copied_while_decoders_are_kept_for_it() -> None:
    model = tiny_llama()
    expected = text(model, MASK)
    other = copy.deepcopy(model)
    assert text(other, MASK) == expected
    assert not any("skipsearch" in name for name in vars(model))


def test_an_attached_generate_without_its_model_says_so() -> None:
    model = tiny_llama()
    ss.attach(model, MASK)
    generate = model.generate
    del model
    with pytest.raises(ss.ModelError, match="hold on to it while it is called"):
        generate(IDS, max_new_tokens=4)


def test_a_drafter_that_learns_goes_on_and_a_seed_still_repeats_a_sample() -> None:
    model = tiny_llama()
    recipe = Recipe(
        (
            SWIFT(
                skip_ratio=0.5,
                window=4,
                bayes_interval=3,
                max_score=1.0,
                draft_length=4,
                exit=make_exit("fixed"),
            ),
        )
    )
    expected = model.generate(IDS, max_new_tokens=30)[0].tolist()
    trials = []
    for _ in range(3):
        assert ss.generate(model, IDS, profile=recipe, max_new_tokens=30)[0].tolist() == expected
        trials.append(decoder_cache._CACHE[model][0].decoder.loop.drafters[0][1].search.n_trials)
    assert 0 < trials[0] < trials[1] < trials[2]
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(
            ss.generate(model, IDS, profile=recipe, max_new_tokens=30, do_sample=True)[0].tolist()
        )
        ss.generate(model, IDS, profile=recipe, max_new_tokens=30)
    assert samples[0] == samples[1]


def test_threads_share_one(tmp_path: Path, reads: list[Path]) -> None:
    model, profile = tiny_llama(), profile_in(tmp_path, small_module(0.1, 4))
    expected, found = text(model, profile), list[list[int]]()
    threads = [
        threading.Thread(target=lambda: found.append(text(model, profile))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    assert len(reads) == 1
    assert os.path.exists(reads[0])
