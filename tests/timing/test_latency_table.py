"""The latency table: kept between searches, and measured anew when the machine is not what it
was.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.cli.open_model import make_decoder
from skipsearch.core.cost_model import Costs
from skipsearch.core.files import write_atomically
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import match_model
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.skip.spec import Skip
from skipsearch.engine.sampler import SamplingParams
from skipsearch.profile import load_profile
from skipsearch.timing import latency_table
from skipsearch.timing.latency import LatencyEntry
from skipsearch.timing.latency_table import (
    N_CHECKED_MASKS,
    load_or_measure_latency_table,
    table_fingerprint,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    return tmp_path / "latency"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(longest draft, context) of each measurement on a machine that is always as fast as `made_up`
    says.
    """
    asked: list[tuple[int, int]] = []

    def measure(
        model: Any,
        max_draft: int,
        context: int,
        repeats: int = 3,
        masks: Any = (),
        sampling: Any = None,
        progress: Any = None,
    ) -> LatencyEntry:
        asked.append((max_draft, context))
        return LatencyEntry(context, made_up(context), 0.01, (0.02,) * len(masks))

    def plain_seconds(model: Any, context: int, sampling: Any = None) -> float:
        asked.append((0, context))
        return made_up(context).verify[0]

    monkeypatch.setattr(latency_table, "measure_latency", measure)
    monkeypatch.setattr(latency_table, "time_plain_pass", plain_seconds)
    return asked


def made_up(context: int, factor: float = 1.0) -> Costs:
    """What drafts of up to 4 tokens cost; a pass costs what its pieces cost."""
    one = factor * (LAYERS * (2 + context / 64) + 0.5)
    verify = (one, *(one + factor * n for n in range(1, 5)))
    return Costs(
        (factor * (1 + context / 64), factor) * LAYERS, factor * 0.5, verify, context / 1024, 0.25
    )


def test_it_is_measured_once_for_a_model_and_read_after_that(
    measured: list[tuple[int, int]], folder: Path
) -> None:
    model, _ = tiny_model_and_reference()
    first = load_or_measure_latency_table(model, 4, 96)
    assert measured == [(4, 96)]
    assert len(first.entry.errors) == N_CHECKED_MASKS
    assert not first.cached
    again = load_or_measure_latency_table(model, 4, 96)
    assert (again.entry, again.cached) == (first.entry, True)
    assert measured[1:] == [(0, 96)], (
        "one plain pass tells whether the machine is as fast as it was"
    )
    assert len(list(folder.iterdir())) == 1


def test_texts_of_nearly_the_same_length_share_a_table(measured: list[tuple[int, int]]) -> None:
    model, _ = tiny_model_and_reference()
    assert load_or_measure_latency_table(model, 4, 250).entry.context == 256
    assert load_or_measure_latency_table(model, 4, 262).cached
    assert not load_or_measure_latency_table(model, 4, 281).cached
    assert load_or_measure_latency_table(model, 4, 1).entry.context == latency_table.CONTEXT_STEP


def test_sampling_has_a_table_of_its_own_because_it_takes_longer(
    measured: list[tuple[int, int]],
) -> None:
    model, _ = tiny_model_and_reference()
    sampling = SamplingParams(0.7, top_k=20)
    load_or_measure_latency_table(model, 4, 32)
    assert not load_or_measure_latency_table(model, 4, 32, sampling=sampling).cached
    assert measured == [(4, 32)] * 2
    assert load_or_measure_latency_table(model, 4, 32, sampling=sampling).cached


def test_on_a_machine_that_became_slower_it_is_measured_again(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model_and_reference()
    load_or_measure_latency_table(model, 4, 32)
    monkeypatch.setattr(
        latency_table,
        "measure_latency",
        lambda m, d, context, **_: LatencyEntry(context, made_up(context, 1.3), 0.0, (0.0,)),
    )
    monkeypatch.setattr(
        latency_table, "time_plain_pass", lambda m, context, **_: made_up(context, 1.3).verify[0]
    )
    again = load_or_measure_latency_table(model, 4, 32)
    assert not again.cached
    assert again.costs == made_up(32, 1.3)


def kept_and_changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Measure a table, and change what its file says."""
    load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32)
    (kept,) = folder.iterdir()
    said = json.loads(kept.read_bytes())
    change(said[0])
    kept.write_text(json.dumps(said))


def is_measured_again_once() -> None:
    model, _ = tiny_model_and_reference()
    assert not load_or_measure_latency_table(model, 4, 32).cached
    again = load_or_measure_latency_table(model, 4, 32)
    assert again.cached
    assert again.costs == made_up(32)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "left_behind", [b"", b"{", b"[]", b"null", b'[{"context": 3}]', b"\xff", b"[" * 100_000]
)
def test_a_file_that_is_none_is_measured_over(left_behind: bytes, folder: Path) -> None:
    kept_and_changed(folder, lambda said: None)
    (kept,) = folder.iterdir()
    kept.write_bytes(left_behind)
    is_measured_again_once()


@pytest.mark.usefixtures("measured")
def test_a_folder_in_its_place_is_left_and_measured_past(folder: Path) -> None:
    kept_and_changed(folder, lambda said: None)
    (kept,) = folder.iterdir()
    kept.unlink()
    kept.mkdir()
    assert not load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32).cached
    assert list(folder.iterdir()) == [kept]
    assert kept.is_dir()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.pop("costs"),
        lambda said: said["errors"].pop(),
        lambda said: said["costs"]["sublayers"].pop(),
        lambda said: said["costs"]["verify"].pop(),
        lambda said: said["costs"].update(overhead=math.inf),
        lambda said: said.update(spread=math.nan),
    ],
)
def test_a_table_of_another_shape_is_measured_over(
    change: Callable[[dict[str, Any]], object], folder: Path
) -> None:
    kept_and_changed(folder, change)
    is_measured_again_once()


@pytest.mark.parametrize(
    ("spread", "error", "sound"),
    [
        (0.01, 0.02, True),
        (latency_table.MAX_SPREAD, latency_table.MAX_MEDIAN_ERROR, True),
        (0.62, 0.02, False),
        (0.21, 0.02, False),
        (0.01, 0.11, False),
    ],
)
def test_one_measured_on_a_busy_machine_is_used_and_not_kept(
    spread: float,
    error: float,
    sound: bool,
    folder: Path,
    measured: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        latency_table,
        "measure_latency",
        lambda m, d, context, **_: LatencyEntry(
            context, made_up(context), spread, (error,) * N_CHECKED_MASKS
        ),
    )
    found = load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32)
    assert found.accurate == sound
    assert found.costs == made_up(32)
    assert load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32).cached == sound
    assert folder.exists() == sound


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(spread=0.62),
        lambda said: said.update(errors=[0.3] * N_CHECKED_MASKS),
    ],
)
def test_a_doubtful_one_that_was_kept_is_measured_over(
    change: Callable[[dict[str, Any]], object], folder: Path
) -> None:
    kept_and_changed(folder, change)
    is_measured_again_once()


def test_a_doubtful_measurement_does_not_replace_a_sound_one(
    measured: list[tuple[int, int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32)
    with monkeypatch.context() as patch:
        patch.setattr(
            latency_table,
            "measure_latency",
            lambda m, d, context, **_: LatencyEntry(context, made_up(context, 2), 0.62, (0.0,)),
        )
        assert load_or_measure_latency_table(
            tiny_model_and_reference()[0], 4, 32, remeasure=True
        ).costs == made_up(32, 2)
    assert load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32).entry == first.entry


def test_on_request_it_is_measured_whatever_is_kept_and_kept_instead(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model_and_reference()
    load_or_measure_latency_table(model, 4, 32)
    del measured[:]
    assert not load_or_measure_latency_table(model, 4, 32, remeasure=True).cached
    assert measured == [(4, 32)], "and not even a plain pass is compared"
    assert load_or_measure_latency_table(model, 4, 32).cached


def test_any_number_of_processes_may_keep_one_at_once(tmp_path: Path) -> None:
    """Each writes under a name of its own: with one name for all, one moved away what another was
    about to.
    """
    path, begin, failed = tmp_path / "table.json", threading.Barrier(4), []

    def write(text: bytes) -> None:
        begin.wait()
        try:
            for _ in range(50):
                write_atomically(path, text)
        except OSError as error:
            failed.append(error)

    texts = [bytes([65 + i]) * 10_000 for i in range(4)]
    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failed
    assert path.read_bytes() in texts
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("measured")
def test_a_folder_that_cannot_be_written_to_keeps_nothing_and_stops_nobody(folder: Path) -> None:
    folder.write_text("a file in its place")
    assert not load_or_measure_latency_table(tiny_model_and_reference()[0], 4, 32).cached


def test_another_model_engine_or_table_has_a_file_of_its_own() -> None:
    model, _ = tiny_model_and_reference()
    names = {
        table_fingerprint(model, 4, 32),
        table_fingerprint(model, 5, 32),
        table_fingerprint(model, 4, 64),
    }
    spec = model.spec
    for changes in (
        {"weights_sha256": "f" * 64},
        {"engine": "other"},
        {"id": "other"},
        {"quantization": "torchao-8bit"},
    ):
        other = type("Other", (), {"spec": replace(spec, **changes)})()
        names.add(table_fingerprint(other, 4, 32))
    assert len(names) == 7


def test_a_real_one_says_what_it_is_worth() -> None:
    sweeps: list[tuple[int, int]] = []
    found = load_or_measure_latency_table(
        tiny_model_and_reference()[0], 2, 32, lambda done, total: sweeps.append((done, total))
    )
    assert "drafts off by" in str(found)
    assert found.costs.verify[0] > 0
    assert found.costs.draft_step_seconds(SkipMask(LAYERS)) == pytest.approx(
        found.costs.verify[0], rel=1e-9
    )
    assert sweeps[0] == (0, 6)


@pytest.mark.usefixtures("measured")
def test_the_guard_weighs_a_profile_alike_wherever_it_is_loaded() -> None:
    """What this machine measured earlier is no part of it: a seed repeats its sample."""
    model, _ = tiny_model_and_reference()
    skip = Skip.from_mask(SkipMask(LAYERS, (0, 1, 2), (1,)), 6, make_exit("fixed"))
    golden = Path(__file__).parent.parent / "profile" / "golden" / "v3_unmeasured.yaml"
    profile = load_profile(golden).model_copy(update={"drafters": (skip,)})
    facts = profile.model.model_copy(update={"n_layers": LAYERS})
    profile = profile.model_copy(update={"model": facts})
    load_or_measure_latency_table(model, 4, 60)
    with pytest.MonkeyPatch.context() as patch:  # the profile is of another model
        patch.setattr(match_model, "check_profile", lambda profile, model: [])
        assert [*make_decoder(model, profile).loop.drafter_costs] == [*profile.drafter_costs]
