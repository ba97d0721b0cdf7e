"""Module files: what is read of them, and what hostile or damaged ones come out as: one
sentence.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers.modules import SMALL_MASK, make_card, noisy_copies
from helpers.tiny import tiny_model_and_reference
from safetensors.torch import save_file

from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained import module_files
from skipsearch.drafters.trained.card import BLOCK_BYTES, BlockFormat
from skipsearch.drafters.trained.module_files import (
    find_module_file,
    list_modules,
    make_reference,
    read_module_header,
)
from skipsearch.drafters.trained.module_weights import load_module, pack_matrices, save_module
from skipsearch.errors import ModuleError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model, _ = tiny_model_and_reference()
    save_module(
        tmp_path / "a.safetensors",
        make_card(model, SMALL_MASK),
        noisy_copies(model, SMALL_MASK, 0.1),
    )
    return tmp_path / "a.safetensors"


def test_the_card_and_the_shapes_are_known_without_reading_a_tensor(path: Path) -> None:
    header = read_module_header(path)
    assert header.card.mask == SMALL_MASK
    assert header.shapes["0.attn.run.q_proj.weight"] == (32, 32)
    assert make_reference(path, "modules/a.safetensors").parameters == header.n_parameters


@pytest.mark.parametrize("blocks", BLOCK_BYTES)
def test_matrices_are_stored_in_the_blocks_that_the_card_names(
    blocks: BlockFormat, tmp_path: Path
) -> None:
    model, _ = tiny_model_and_reference()
    tensors = noisy_copies(model, SMALL_MASK, 0.1) | {"odd": torch.ones(3, 31)}
    card = make_card(model, SMALL_MASK).model_copy(update={"blocks": blocks})
    save_module(tmp_path / "a.safetensors", card, pack_matrices(tensors, blocks))
    _, stored = load_module(tmp_path / "a.safetensors")
    assert read_module_header(tmp_path / "a.safetensors").shapes == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    step = {"Q4_0": 1 / 8, "Q5_0": 1 / 16, "Q8_0": 1 / 127}[blocks]
    for name, tensor in tensors.items():
        error = (stored[name] - tensor).abs().max() if tensor.ndim == 2 else 0.0
        assert error <= step * tensor.abs().max()
        assert tensor.ndim == 2 or torch.equal(stored[name], tensor)


def test_equal_modules_are_equal_files(path: Path, tmp_path: Path) -> None:
    model, _ = tiny_model_and_reference()
    save_module(
        tmp_path / "b.safetensors",
        make_card(model, SMALL_MASK),
        noisy_copies(model, SMALL_MASK, 0.1),
    )
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def test_a_module_is_found_by_name_and_hash_in_the_first_folder_that_has_it(
    path: Path, tmp_path: Path
) -> None:
    ref = make_reference(path, "a.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.safetensors").write_bytes(b"another module of that name")
    assert find_module_file(ref, [tmp_path / "none", other, tmp_path]) == path


def mangled(path: Path, change: str) -> Path:
    content, there = path.read_bytes(), path
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    match change:
        case "cut short":
            content = content[:-7]
        case "cut in its header":
            content = content[:40]
        case "empty":
            content = b""
        case "a pickle":
            content = pickle.dumps({"weights": [1.0]})
        case "a torch file":
            torch.save({"w": torch.ones(3)}, path)
            content = path.read_bytes()
        case "an LFS pointer":
            content = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
        case "a huge header":
            content = (2**40).to_bytes(8, "little") + content[8:]
        case "a header larger than any":
            new = module_files.MAX_HEADER_BYTES + 1
            content = new.to_bytes(8, "little") + content[8 : 8 + length].ljust(new)
            content += path.read_bytes()[8 + length :]
        case "no JSON":
            content = content[:8] + b"x" * length + content[8 + length :]
        case "nested":
            content = (2**20).to_bytes(8, "little") + b"[" * 2**20
        case "integers":
            save_file(
                {"0.attn.run.q_proj.weight": torch.ones(3, dtype=torch.int64)},
                path,
                {module_files.CARD_KEY: "{}"},
            )
            content = path.read_bytes()
        case "another safetensors file":
            save_file({"w": torch.ones(3)}, path, {"format": "pt"})
            content = path.read_bytes()
        case "half a block" | "blocks that the card does not name":
            card = json.loads(header["__metadata__"][module_files.CARD_KEY])
            card |= {"blocks": "Q8_0"} if change == "half a block" else {}
            stored = torch.zeros(3, 34 + 17 * (change == "half a block"), dtype=torch.uint8)
            save_file({"w": stored}, path, {module_files.CARD_KEY: json.dumps(card)})
            content = path.read_bytes()
        case "no card" | "a card of another kind" | "a card that skips all":
            card = json.loads(header["__metadata__"][module_files.CARD_KEY])
            card |= {
                "no card": {"kind": 3},
                "a card of another kind": {"kind": "magic"},
                "a card that skips all": {"attn": list(range(5)), "mlp": list(range(5))},
            }[change]
            header["__metadata__"][module_files.CARD_KEY] = json.dumps(card)
            new = json.dumps(header).encode()
            content = len(new).to_bytes(8, "little") + new + content[8 + length :]
    there.write_bytes(content)
    return there


CHANGES = (
    "cut short",
    "cut in its header",
    "empty",
    "a pickle",
    "a torch file",
    "an LFS pointer",
    "a huge header",
    "a header larger than any",
    "no JSON",
    "nested",
    "integers",
    "another safetensors file",
    "half a block",
    "blocks that the card does not name",
    "no card",
    "a card of another kind",
    "a card that skips all",
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_or_hostile_file_is_one_sentence_that_names_it(path: Path, change: str) -> None:
    with pytest.raises(ModuleError) as error:
        load_module(mangled(path, change))
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("change", ["a pickle", "a torch file"])
def test_a_pickle_is_called_one(path: Path, change: str) -> None:
    with pytest.raises(ModuleError, match="this is a pickle"):
        read_module_header(mangled(path, change))


@pytest.mark.parametrize("start", [b"\x80\x20", b"PK"], ids=["pickle", "zip"])
def test_a_header_whose_length_begins_as_pickles_do_is_read(path: Path, start: bytes) -> None:
    content, wanted = path.read_bytes(), int.from_bytes(start, "little")
    length = int.from_bytes(content[:8], "little")
    assert length < wanted
    path.write_bytes(
        wanted.to_bytes(8, "little") + content[8 : 8 + length].ljust(wanted) + content[8 + length :]
    )
    assert read_module_header(path).card.mask == SMALL_MASK


def test_values_that_are_no_numbers_are_refused(path: Path, tmp_path: Path) -> None:
    model, _ = tiny_model_and_reference()
    tensors = noisy_copies(model, SMALL_MASK, 0.1)
    tensors["4.mlp.run.up_proj.weight"][3, 3] = torch.nan
    save_module(path, make_card(model, SMALL_MASK), tensors)
    with pytest.raises(
        ModuleError, match=r"4\.mlp\.run\.up_proj\.weight holds values that are not numbers"
    ):
        load_module(path)


def test_a_file_of_ten_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.truncate(10 * 2**30)  # sparse
    with pytest.raises(ModuleError, match=r"has 10\.0 GiB, and no module may have more than 4"):
        read_module_header(path)


def test_pipes_and_folders_are_no_modules_and_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe.safetensors", "folder.safetensors"):
        with pytest.raises(ModuleError, match="folder, device or pipe"):
            read_module_header(tmp_path / name)


def test_a_file_of_the_right_name_and_another_hash_is_not_the_module(
    path: Path, tmp_path: Path
) -> None:
    ref = make_reference(path, "a.safetensors").model_copy(update={"sha256": "0" * 64})
    with pytest.raises(ModuleError, match="not the module that was measured"):
        find_module_file(ref, [tmp_path])
    with pytest.raises(ModuleError, match="is not there; it was looked for in no folder at all"):
        find_module_file(ref, [])


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "a/../b.safetensors",
        ".a.safetensors",
        "a.pt",
        "a\\b.safetensors",
        "a//b.safetensors",
        "a\n.safetensors",
        "x" * 200 + ".safetensors",
    ],
)
def test_a_name_that_leads_elsewhere_is_no_name_of_a_module(path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file"):
        ModuleRef(file=name, sha256="0" * 64, parameters=1)
    with pytest.raises(ModuleError, match="cannot be the name"):
        make_reference(path, name)


def test_a_folder_without_modules_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModuleError, match="skipsearch train adapted"):
        list(list_modules(tmp_path))
    with pytest.raises(ModuleError, match="not a folder"):
        list(list_modules(tmp_path / "none"))
