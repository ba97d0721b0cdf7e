"""Every system of a benchmark does the same work: so many greedy tokens.

An end-of-sequence token among them changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.command import run_in_process
from helpers.profiles import write_demo_profile

import skipsearch as ss
from skipsearch.bench import SYSTEMS, make_systems
from skipsearch.bench.systems import LOOKUP_SPEC, SKIP_DRAFT_LENGTH
from skipsearch.core.recipe import DRAFTERS
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.errors import DecodeError
from skipsearch.models import ModelAdapter
from skipsearch.profile import Profile, load_profile


@cache
def demo(engine: str) -> ModelAdapter:
    return ss.load_model("demo", device="cpu", dtype="float32", engine=engine)


def opener() -> Callable[[str], ModelAdapter]:
    return lambda engine: demo("lean" if engine == "auto" else engine)


def prompt() -> list[int]:
    return list(demo("hf").tokenizer("import os\n\ndef main(argv=None):")["input_ids"])


def test_systems_write_the_same_tokens_and_go_on_behind_an_end_of_sequence_token() -> None:
    hf = demo("hf")
    (plain,) = make_systems(["plain"], "hf", None, opener())
    tokens = plain.run(prompt(), 12).tokens
    generation = hf.model.generation_config  # type: ignore[attr-defined]
    before, generation.eos_token_id = generation.eos_token_id, tokens[3]
    try:
        stopping = ss.adapt(hf.model, hf.tokenizer)  # type: ignore[attr-defined]
        names = ["plain", "hf-generate", "hf-lookup", "hf-early-exit"]
        for system in make_systems(names, "hf", None, lambda engine: stopping):
            run = system.run(prompt(), 12)
            assert run.tokens == tokens, system.name
            assert run.first_token_s > 0
            assert run.decode_s > 0
    finally:
        generation.eos_token_id = before
    assert len(tokens) == 12


def test_a_system_may_name_another_engine() -> None:
    plain, other = make_systems(["plain", "plain@hf"], "auto", None, opener())
    assert (plain.model.spec.engine, other.model.spec.engine) == ("lean", "hf")
    assert plain.run(prompt(), 6).tokens == other.run(prompt(), 6).tokens


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["hf-generat"], "did you mean hf-generate"),
        (["plain@warp"], "no system called 'plain@warp'"),
        (["profile"], "the system `profile` needs --profile FILE"),
        (["profile@hf"], "the system `profile@hf` needs --profile FILE"),
        (["profile:skip@hf"], "the system `profile:skip@hf` needs --profile FILE"),
        (["profile:lokup"], "did you mean profile:lookup"),
        (["plain", "plain"], "the system plain is named twice; one run"),
        (["hf-compile"], "hf-compile cannot take part on a CPU"),
    ],
)
def test_a_system_that_cannot_take_part_is_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(DecodeError, match=sentence):
        make_systems(names, "auto", None, opener())


@pytest.fixture
def mixed(tmp_path: Path) -> Profile:
    """Return a recipe with lookup and a mask, which was never measured."""
    profile = load_profile(write_demo_profile(tmp_path / "profile.yaml"))
    return profile.model_copy(
        update={"drafters": (Lookup(min_match=3, draft_length=5), *profile.drafters)}
    )


def test_a_profiles_recipe_takes_part_whole_and_in_parts(mixed: Profile) -> None:
    plain, *systems = make_systems(
        ["plain", "profile", "profile:lookup", "profile:skip"], "auto", mixed, opener()
    )
    assert [system.decoder.recipe.drafters for system in systems] == [
        mixed.drafters,
        mixed.drafters[:1],
        mixed.drafters[1:],
    ]  # type: ignore[attr-defined]
    guarded = [s.decoder.loop.drafter_costs for s in systems]  # type: ignore[attr-defined]
    costs = list(mixed.drafter_costs)
    assert guarded == [costs, costs[:1], costs[1:]]  # as `chat` and `serve` decode
    assert {system.model.spec.engine for system in systems} == {"lean"}
    (other,) = make_systems(["profile:skip@hf"], "auto", mixed, opener())
    assert other.model.spec.engine == "hf"
    tokens = plain.run(prompt(), 24).tokens
    assert [system.run(prompt(), 24).tokens for system in systems] == [tokens] * 3


def test_a_part_that_a_profile_does_not_have_is_refused(mixed: Profile) -> None:
    alone = mixed.model_copy(update={"drafters": mixed.drafters[1:]})
    with pytest.raises(
        DecodeError,
        match="needs a profile that drafts by lookup, and this one's recipe is skip 4 sub-layers",
    ):
        make_systems(["profile:lookup"], "auto", alone, opener())


def test_a_profile_of_another_model_does_not_take_part(mixed: Profile) -> None:
    other = mixed.model_copy(update={"model": mixed.model.model_copy(update={"n_layers": 21})})
    for system in ("profile", "profile:lookup"):
        with pytest.raises(ss.ProfileError, match="21 layers"):
            make_systems([system], "auto", other, opener())


def test_other_profiles_of_the_model_take_part_by_their_files(
    mixed: Profile, tmp_path: Path
) -> None:
    path = str(write_demo_profile(tmp_path / "other@1.yaml"))
    other, own = make_systems([path, "profile"], "auto", mixed, opener())
    assert (other.name, other.decoder.recipe.drafters) == (path, mixed.drafters[1:])
    assert own.decoder.recipe.drafters == mixed.drafters
    (alone,) = make_systems([path], "auto", None, opener())
    assert alone.run(prompt(), 8).tokens == own.run(prompt(), 8).tokens
    with pytest.raises(ss.ProfileError, match=r"missing\.yaml"):
        make_systems([str(tmp_path / "missing.yaml")], "auto", mixed, opener())


def test_unsearched_lookup_drafts_alone_and_before_the_unsearched_mask() -> None:
    plain, lookup, both, skip = make_systems(
        ["plain", "lookup", "lookup+skip", "skip"], "auto", None, opener()
    )
    assert [d.kind for d in both.decoder.recipe.drafters] == ["lookup", "skip"]  # type: ignore[attr-defined]
    assert both.decoder.recipe.drafters == (
        *lookup.decoder.recipe.drafters,
        *skip.decoder.recipe.drafters,
    )  # type: ignore[attr-defined]
    text = prompt() * 3
    tokens = plain.run(text, 24).tokens
    for system in (lookup, both):
        run = system.run(text, 24)
        assert run.tokens == tokens
        assert run.stats is not None
        assert run.stats.by_drafter[0].drafted > 0


def test_the_help_says_how_the_unsearched_systems_draft(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, printed, _ = run_in_process(capsys, monkeypatch, "bench", "run", "--help")
    said = " ".join(printed.replace("│", " ").split())
    assert (
        f"lookup ({LOOKUP_SPEC.min_match} tokens must match, up to {LOOKUP_SPEC.draft_length} "
        "drafted)" in said
    )
    assert f"skip (every second sub-layer, unsearched, {SKIP_DRAFT_LENGTH} drafted)" in said


def test_hugging_faces_systems_need_a_hugging_face_model() -> None:
    with pytest.raises(DecodeError, match="not held as a Hugging Face model"):
        make_systems(["hf-generate"], "auto", None, lambda engine: demo("lean"))


def test_the_unsearched_mask_leaves_out_every_second_sub_layer() -> None:
    plain, skip = make_systems(["plain", "skip"], "auto", None, opener())
    run = skip.run(prompt(), 24)
    assert run.tokens == plain.run(prompt(), 24).tokens
    assert run.stats is not None
    assert run.stats.drafted > run.stats.accepted > 0
    mask = skip.decoder.recipe.mask(20)
    assert mask is not None
    assert mask.n_skipped == 20
    assert len(mask.attn) == len(mask.mlp) == 10


def test_every_engine_has_a_plain_and_a_drafting_system() -> None:
    assert {
        "plain",
        "profile",
        "plain@hf",
        "plain@lean",
        "plain@native",
        "plain@graph",
        "profile@native",
    } < set(SYSTEMS)
    assert {f"profile:{kind}@hf" for kind in DRAFTERS} < set(SYSTEMS)
