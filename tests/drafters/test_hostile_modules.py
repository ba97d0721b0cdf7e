"""Modules of every kind that are damaged, of another model, or made to do harm: `tune --modules`
and `decode` say so in one sentence.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import run_in_process
from helpers.embedded import embedded_model
from safetensors import safe_open
from safetensors.torch import save_file

from drafters.test_bundled_modules import MODULES
from skipsearch.core.reading import READ_ALL
from skipsearch.core.recipe import Recipe
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.trained import module_files
from skipsearch.drafters.trained.module_files import ModuleRef, hash_module_file
from skipsearch.errors import ModuleError
from skipsearch.tuning.calibration import load_trained_drafts


class Harm:
    """What a pickle would do when it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def edited(path: Path, change: str) -> None:
    """The module with other tensors, or another card."""
    with safe_open(path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        card = json.loads(stored.metadata()[module_files.CARD_KEY])
    name = max(tensors, key=lambda name: tensors[name].ndim)
    match change:
        case "values that are no numbers":
            tensors[name][0, 0] = torch.nan
        case "infinite values":
            tensors[name][0, 0] = -torch.inf
        case "another shape":
            tensors[name] = tensors[name][:, :-1].contiguous()
        case "a tensor too few":
            del tensors[name]
        case "a tensor of nobody":
            tensors["19.mlp.run.nobody.weight"] = torch.ones(3, 3)
        case "weights of another model":
            card["base"]["weights_sha256"] = "0" * 64
        case "layers of another model":
            card["base"]["n_layers"] = 24
            if card["exit_layer"]:
                card |= {key: list(range(card["exit_layer"], 24)) for key in ("attn", "mlp")}
        case "a family of another model":
            card["base"]["family"] = "mistral"
        case "the kind of another module":
            other = "adapted" if card["kind"] == "s3d" else "s3d"
            card |= {"kind": other, "form": "lora", "rank": 2, "exit_layer": None}
    save_file(tensors, path, {module_files.CARD_KEY: json.dumps(card)})


EDITS = (
    "values that are no numbers",
    "infinite values",
    "another shape",
    "a tensor too few",
    "a tensor of nobody",
    "weights of another model",
    "layers of another model",
    "a family of another model",
    "the kind of another module",
)
SAID = {
    "cut short": "cut short",
    "a pickle": "this is a pickle",
    "ten gigabytes": "has 10.0 GiB",
    "empty": "cut short",
    "values that are no numbers": "not numbers",
    "infinite values": "not numbers",
    "weights of another model": "has other weights",
    "layers of another model": "of 24 layers",
    "a family of another model": "is a mistral",
}


def mangled(module: Path, folder: Path, change: str) -> Path:
    path = folder / module.name
    path.write_bytes(module.read_bytes())
    match change:
        case "cut short":
            path.write_bytes(module.read_bytes()[:-7])
        case "empty":
            path.write_bytes(b"")
        case "a pickle":
            path.write_bytes(pickle.dumps(Harm(folder / "harmed")))
        case "ten gigabytes":
            with open(path, "r+b") as file:
                file.truncate(10 * 2**30)  # sparse
        case _:
            edited(path, change)
    return path


@pytest.mark.parametrize("change", ["cut short", "empty", "a pickle", "ten gigabytes", *EDITS])
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_it_is_refused_in_one_sentence_that_names_it(
    module: Path, change: str, tmp_path: Path
) -> None:
    model = embedded_model()
    path = mangled(module, tmp_path, change)
    with pytest.raises(ModuleError) as error:
        load_trained_drafts(model, tmp_path, lambda event: None)
    said = str(error.value)
    assert said.startswith(str(path))
    assert SAID.get(change, "") in said
    assert "\n" not in said
    assert len(said) < 500
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("change", EDITS)
def test_a_recipe_that_names_it_by_its_hash_is_refused_too(change: str, tmp_path: Path) -> None:
    """Whoever wrote the profile wrote the module."""
    model, module = embedded_model(), MODULES[0]
    [good] = load_trained_drafts(model, module.parent, lambda event: None)
    path = mangled(module, tmp_path, change)
    spec = good.make_spec(DraftPolicy(4), READ_ALL).model_copy(
        update={"module": ModuleRef(file=path.name, sha256=hash_module_file(path), parameters=1)}
    )
    with pytest.raises(ModuleError) as error:
        Recipe((spec,)).drafters[0].build(model, [tmp_path])
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("change", ["a pickle", "values that are no numbers"])
def test_the_command_says_it_too(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mangled(MODULES[0], tmp_path, change)
    code, _, shown = run_in_process(
        capsys,
        monkeypatch,
        "tune",
        "--model",
        "demo",
        "--task",
        "pycode",
        "--modules",
        tmp_path,
        "--out",
        tmp_path / "p.yaml",
        "--threads",
        1,
    )
    assert code == 1
    assert path.name in shown
    assert SAID[change] in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "harmed").exists()
