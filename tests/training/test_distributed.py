"""Several processes that train one module: together they take the steps of one process with all of
their texts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding.training_checks import pupils, texts

from skipsearch.drafters.trained.module_weights import load_module
from skipsearch.errors import ModuleError
from skipsearch.training.distributed import SINGLE_PROCESS, ProcessGroup, join_process_group
from skipsearch.training.trainer import Trainer, TrainSettings

TRAINED = TrainSettings(steps=3, seconds=None, batch_size=2, top_k=16)


class Noting(ProcessGroup):
    """One of `count` processes, the others of which nobody started. gradients: those that it would
    have exchanged.
    """

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.n_processes, self.gradients = rank, count, list[torch.Tensor]()

    def average_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        self.gradients = [tensor.clone() for tensor in tensors]

    def broadcast_from_main(self, value: float) -> float:
        return value


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(4, id="kangaroo"),
        pytest.param(0, id="adapted", marks=pytest.mark.thorough),
        pytest.param(1, id="s3d", marks=pytest.mark.thorough),
    ],
)
def test_the_mean_of_two_gradients_is_that_of_twice_as_many_texts(number: int) -> None:
    """And each process reads texts of its own."""
    read = list[torch.Tensor]()
    first, second, whole = Noting(0, 2), Noting(1, 2), Noting()
    for together, batch in ((first, 2), (second, 2), (whole, 4)):
        trainer = Trainer(
            list(pupils())[number], texts(), replace(TRAINED, batch_size=batch), together
        )
        real = trainer.student.run_teacher
        trainer.student.run_teacher = lambda some, likeliest, real=real: (
            read.append(some) or real(some, likeliest)
        )  # type: ignore[method-assign, misc]
        trainer.run_step(0.0)
    for a, b, both in zip(first.gradients, second.gradients, whole.gradients, strict=True):
        torch.testing.assert_close((a + b) / 2, both, rtol=1e-6, atol=1e-12)
    assert torch.equal(torch.cat(read[:2]), read[2])
    assert not torch.equal(read[0], read[1])


def test_a_process_of_its_own_is_alone() -> None:
    assert join_process_group("cpu") is SINGLE_PROCESS
    assert SINGLE_PROCESS.is_main
    assert SINGLE_PROCESS.all_equal("anything")
    assert SINGLE_PROCESS.broadcast_from_main(0.5) == 0.5


def test_processes_that_begin_with_another_mask_are_refused() -> None:
    class Disagreeing(Noting):
        def all_equal(self, fact: str) -> bool:
            return False

    trainer = Trainer(next(pupils()), texts(), TRAINED, Disagreeing(0, 2))
    with pytest.raises(ModuleError, match="do not begin with the same"):
        trainer.run()


def command(folder: Path, *more: object) -> list[str]:
    return [
        *map(
            str,
            (
                "train",
                "kangaroo",
                "--model",
                "demo",
                "--data",
                folder / "text.txt",
                "--exit-layer",
                4,
                "--steps",
                4,
                "--threads",
                1,
                "--dtype",
                "float32",
                "--device",
                "cpu",
                "--json",
                *more,
            ),
        )
    ]


def ran(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.thorough
def test_two_processes_write_the_module_of_one_with_twice_the_batch(tmp_path: Path) -> None:
    """As `accelerate launch` starts them, over gloo. The main one tells and writes; the checkpoint
    is gone.
    """
    (tmp_path / "text.txt").write_text(
        "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 400
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    around = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    together = around | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    python = [sys.executable, "-m", "skipsearch.cli.main"]

    def start(environment: dict[str, str], *more: object) -> subprocess.Popen[str]:
        whole = [*python, *command(tmp_path, *more)]
        return subprocess.Popen(
            whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    both = [
        start(
            together | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            "--batch-size",
            2,
            "--out",
            tmp_path / "two",
        )
        for rank in (0, 1)
    ]
    (told, _), (silence, shown) = map(ran, both)
    one, _ = ran(start(around, "--batch-size", 4, "--out", tmp_path / "one"))
    assert silence == shown == ""
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["kangaroo-4.safetensors"]
    cards = [json.loads(each)["card"]["trained"] for each in (told, one)]
    assert [(card["steps"], card["rows"], card["tokens"]) for card in cards] == [
        (4, 4 * 4 * 256, 2 * 4 * 256)
    ] * 2
    tensors = [
        load_module(tmp_path / name / "kangaroo-4.safetensors")[1] for name in ("two", "one")
    ]
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name], rtol=1e-4, atol=1e-5)
