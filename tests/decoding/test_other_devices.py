"""The checks of this folder and the planted bugs, with the model on another device than the CPU.

The device is a GPU, or `away`, which imitates one as far as a CPU can. The full model of the
comparison stays on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import fake_device
from helpers.tiny import tiny_model_and_reference, use_engine

from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.errors import DecodeError, ModelError

from .checks import MASKS, PROMPTS
from .planted import BUGS, CHECKS, Check

# What they look at is what the unmodified modules are called with, or trained by.
OF_MODULES = (
    "check_kangaroo_passes",
    "check_s3d_rows",
    "check_adapted_rows",
    "check_kangaroo_rows",
    "check_only_the_drafts_own_learns",
)
# On `graph` a verify pass runs the first layers again, instead of continuing after them, so that
# these mistakes have no place there.
OF_RESUMING = (
    "adapter_does_not_catch_up",
    "adapter_is_not_rolled_back",
    "adapter_keeps_what_it_wrote_of_rejected_tokens",
    "rows_of_rejected_tokens_are_kept",
    "draft_writes_a_slot_too_early",
    "verification_resumes_from_stale_rows",
    "verification_resumes_a_layer_too_late",
    "siblings_skip_the_layers_below_the_exit",
)
# They read slots of a plan on the host, which a captured pass cannot.
READING_SLOTS = ("stale_kv_at_accepted_positions", "full_model_kv_missing")


@contextmanager
def skipped_if_exact_passes_are_refused(device: str) -> Iterator[None]:
    """On a GPU, the bits of a row may depend on its pass, and then `exact` is refused."""
    try:
        yield
    except DecodeError as error:
        if device != "cuda" or "exact decoding is not possible" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(
    params=[
        pytest.param("away", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    scope="module",
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "away":
        fake_device.register_device()
    return request.param


@pytest.fixture(params=["hf", "lean", "graph"], autouse=True)
def engine(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    with use_engine(request.param, device):
        yield request.param


def test_the_model_is_on_the_device(device: str) -> None:
    model, full = tiny_model_and_reference()
    assert model.spec.device.type == device
    assert {tensor.device.type for tensor in full.hf.parameters()} == {"cpu"}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_passes(check: Check, engine: str, device: str) -> None:
    if engine != "hf" and check.__name__ in OF_MODULES:
        pytest.skip("of the engine hf")
    with skipped_if_exact_passes_are_refused(device):
        check()


@pytest.mark.parametrize("bug", BUGS)
def test_a_check_fails_while_the_bug_is_planted(bug: str, engine: str, device: str) -> None:
    plant, check = BUGS[bug]
    if engine != "hf" and check.__name__ in OF_MODULES:
        pytest.skip("of the engine hf")
    if engine == "graph" and bug in OF_RESUMING:
        pytest.skip("of engines that resume a pass")
    if (engine, device) == ("graph", "cuda") and bug in READING_SLOTS:
        pytest.skip("it reads slots, which a captured pass cannot")
    with (
        skipped_if_exact_passes_are_refused(device),
        plant(),
        pytest.raises((AssertionError, ModelError)),
    ):
        check()


@pytest.mark.parametrize(
    "mixed", [torch.add, lambda there, here: torch.nn.functional.linear(there, here.expand(2, 3))]
)
def test_the_device_refuses_tensors_of_another(device: str, mixed) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mixed(torch.ones(3, device=device), torch.ones(3))


@pytest.mark.parametrize(
    ("exit_kind", "most"), [(None, 1.0), ("fixed", 2.0), ("confidence", 2.0 + 4)]
)
def test_the_host_waits_once_a_round_and_for_what_an_exit_policy_asks(
    exit_kind: str | None, most: float, device: str
) -> None:
    """It waits for the verdict of a verify pass, for accepted tokens if any, and for confidences.

    There is one confidence for each drafted token.
    """
    if device != "away":
        pytest.skip("counted on the imitated device")
    model, _ = tiny_model_and_reference()
    decoder = (
        Decoder(model, MASKS[0], draft_length=4, exit_policy=make_exit(exit_kind))
        if exit_kind
        else Decoder(model)
    )
    decoder.generate(PROMPTS[0], 10)
    before = fake_device.register_device().fetched()
    stats = decoder.generate(PROMPTS[0], 40).stats
    assert (
        1 <= (fake_device.register_device().fetched() - before) / (stats.rounds + 1) <= most
    )  # and once after the prompt
