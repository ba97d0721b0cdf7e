"""Comparing, drawing and importing profiles."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from profile_samples import lost, mixed, plain, speculate, unmeasured
from rich.console import Console

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ProfileError
from skipsearch.profile import Interval, Profile, dump_profile, parse_profile
from skipsearch.profile.compare import compare_profiles
from skipsearch.profile.import_ import import_skip_sets
from skipsearch.profile.paths import profile_path
from skipsearch.profile.show import describe_profile, describe_prompts, draw_mask

PUBLISHED = Path(__file__).parents[2].parent / "shared" / "data"


def drawn(mask: SkipMask, width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width)
    console.print(draw_mask(mask))
    file.seek(0)
    return file.read().splitlines()


def test_a_mask_is_drawn_as_a_row_of_attention_and_a_row_of_mlps_under_a_ruler() -> None:
    assert drawn(SkipMask(16, attn=(3, 4), mlp=(7,))) == [
        "layer 0    5    10   15   █ runs, · skipped in drafts",
        "attn  ███··███████████",
        "mlp   ███████·████████",
    ]


def test_a_deep_mask_wraps_to_the_terminal_and_keeps_its_ruler() -> None:
    assert drawn(SkipMask(12, attn=(0, 11)), width=17) == [
        "layer 0    5",
        "attn  ·█████████",
        "mlp   ██████████",
        "layer 10",
        "attn  █·",
        "mlp   ██",
    ]


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    assert drawn(SkipMask(4, attn=(1,)), encoding="ascii")[1:] == ["attn  #.##", "mlp   ####"]


def test_a_profile_says_whether_its_prompts_went_through_a_chat_template() -> None:
    bare = speculate()
    chat = bare.model_copy(
        update={"task": bare.task.model_copy(update={"chat_template_sha256": "7e" * 32})}
    )
    assert "chat" not in dump_profile(bare)
    assert f"chat_template_sha256: {'7e' * 32}" in dump_profile(chat)
    assert [describe_profile(profile)[1] for profile in (bare, chat)] == [
        "task     pycode version 1, temperature 0",
        "task     pycode version 1, temperature 0, prompts in the chat template",
    ]
    assert compare_profiles(bare, chat).changes == {"task.chat_template_sha256": (None, "7e" * 32)}


def changed(profile: Profile, old: str, new: str) -> Profile:
    text = dump_profile(profile)
    assert old in text
    return parse_profile(text.replace(old, new).encode(), "x.yaml")


def test_comparing_a_profile_with_itself_finds_nothing() -> None:
    same = compare_profiles(speculate(), speculate())
    assert same.mask_diff is not None
    assert (
        same.mask_diff.jaccard,
        same.mask_diff.only_a.n_skipped,
        same.mask_diff.only_b.n_skipped,
        same.changes,
    ) == (1.0, 0, 0, {})
    assert not any(apart for _, _, apart in same.intervals.values())


def test_comparing_tells_sublayers_settings_and_whether_intervals_are_apart() -> None:
    other = changed(speculate(), "attn: [3, 4], mlp: [7]", "attn: [4, 5], mlp: [7]")
    other = changed(
        changed(other, "threshold: 0.6", "threshold: 0.5"), "[1.31, 1.366]", "[1.1, 1.366]"
    )
    other = changed(other, "{mean: 3.352, ci95: [3.29, 3.419]}", "{mean: 3.1, ci95: [3.0, 3.2]}")
    found = compare_profiles(speculate(), other)
    assert found.mask_diff is not None
    assert found.mask_diff.jaccard == 2 / 4
    assert (found.mask_diff.only_a, found.mask_diff.only_b) == (
        SkipMask(16, attn=(3,)),
        SkipMask(16, attn=(5,)),
    )
    assert found.changes == {"drafters.skip.exit.threshold": (0.6, 0.5)}
    assert {key: apart for key, (_, _, apart) in found.intervals.items()} == {
        "ms_per_token": True,
        "speedup": False,
    }
    assert found.intervals["speedup"][0] == Interval(mean=1.337, ci95=(1.31, 1.366))
    assert json.loads(json.dumps(found.as_dict()))["only_a"] == {"attn": [3], "mlp": []}


def test_recipes_of_different_shape_are_told_apart_by_drafter_and_their_masks_compared() -> None:
    found = compare_profiles(speculate(), changed(mixed(), "draft_length: 8", "draft_length: 6"))
    assert found.mask_diff is not None
    assert found.mask_diff.jaccard == 1.0
    assert found.changes == {
        "drafters": ("skip", "lookup,skip"),
        "drafters.skip.draft_length": (8, 6),
        "drafters.skip.exit.across_requests": (None, True),
        "drafters.lookup": (
            None,
            "lookup: 2 tokens must match, copies up to 16, at most 4 per matched token",
        ),
    }
    assert 'drafters: skip → "lookup,skip"' in found.format_lines()


def test_two_drafters_of_a_kind_are_told_apart_by_their_order() -> None:
    line = "  - {kind: lookup, min_match: 2, per_match: 4, draft_length: 16}\n"
    without_counts = mixed().model_copy(update={"measured": speculate().measured})
    two = changed(
        without_counts, line, line + "  - {kind: lookup, min_match: 1, draft_length: 2}\n"
    )
    assert compare_profiles(without_counts, two).changes == {
        "drafters": ("lookup,skip", "lookup,lookup,skip"),
        "drafters.lookup-2": (None, "lookup: 1 token must match, copies up to 2"),
    }


def test_without_a_mask_on_both_sides_only_the_rest_is_compared() -> None:
    lookups = mixed().model_copy(update={"drafters": mixed().drafters[:1]})
    for a, b in (
        (speculate(), lookups),
        (lookups, lookups),
        (plain(), plain()),
        (plain(), speculate()),
    ):
        found = compare_profiles(a, b)
        assert found.mask_diff is None
        assert found.as_dict()["jaccard"] is found.as_dict()["only_a"] is None
        assert not [line for line in found.format_lines() if "Jaccard" in line]
        assert found.format_lines()


def test_what_lost_is_compared_with_what_won() -> None:
    found = compare_profiles(speculate(), lost())
    assert found.changes == {"verdict": ("speculate", "plain")}
    assert found.mask_diff is not None
    assert found.mask_diff.jaccard == 1.0


@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        pytest.param("narrow", "32 hold-out prompts (enough for ±5 %)", id="narrow"),
        pytest.param("prompts_ended", "32 hold-out prompts", id="prompts-ended"),
        pytest.param(None, "32 hold-out prompts", id="older-profile"),
    ],
)
def test_prompts_that_sufficed_are_said_to_suffice(stopped: str | None, told: str) -> None:
    measured = speculate().measured
    assert measured is not None
    assert describe_prompts(measured.model_copy(update={"stopped": stopped})) == told


def test_a_profile_names_its_drafters_in_their_order_and_what_each_brought() -> None:
    told = describe_profile(mixed())
    first = told.index(
        "drafts   lookup: 2 tokens must match, copies up to 16, at most 4 per matched token"
    )
    assert told[first + 1] == "or else  skip 3 sub-layers, adaptive 0.6 for 0.9, up to 8"
    assert "lookup   400 rounds, 3200 tokens drafted, 1900 accepted (59%)" in told
    assert "skip     700 rounds, 2100 tokens drafted, 1500 accepted (71%)" in told
    assert "copied   31% of the tokens, from the prompt" in told
    assert "drafts   nothing" in describe_profile(plain())
    assert "drafts   skip 3 sub-layers, adaptive 0.6 for 0.9, up to 8" in describe_profile(lost())


def test_masks_of_different_depth_are_not_compared() -> None:
    with pytest.raises(
        ProfileError, match="demo has 16 layers and meta-llama/Llama-2-13b-hf has 40"
    ):
        compare_profiles(speculate(), unmeasured())


def skip_sets(folder: Path, data: object) -> Path:
    path = folder / "skip_layers.json"
    path.write_text(json.dumps(data))
    return path


def test_a_model_alone_is_imported_for_any_task_and_a_suffix_names_the_task(tmp_path: Path) -> None:
    mask = {"attention": [30, 3], "mlp": [6]}
    one, two = import_skip_sets(
        skip_sets(tmp_path, {"llama-2-13b": mask, "llama-2-13b_chat_cnndm": mask})
    )
    assert one.mask == SkipMask(40, attn=(3, 30), mlp=(6,))
    assert str(one.recipe) == "skip 3 sub-layers, adaptive 0.6 for 0.9, up to 12", (
        "as Draft & Verify drafts by default"
    )
    assert (one.verdict, one.model.id, one.task.name) == (
        "unmeasured",
        "meta-llama/Llama-2-13b-hf",
        "any",
    )
    assert (two.model.id, two.task.name) == ("meta-llama/Llama-2-13b-chat-hf", "cnndm")
    assert "self-speculative-decoding" in str(one.provenance.source)
    assert "SWIFT" in str(two.provenance.source)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ([], "a file of skip sets is a map"),
        ({"llama-3-13b": {"attention": [1], "mlp": []}}, "did you mean llama-2-13b"),
        ({"llama-2-13b": {"attention": [1]}}, "two keys, `attention` and `mlp`"),
        ({"llama-2-13b": {"attention": [40], "mlp": []}}, "attn layer 40 is outside 0..39"),
        ({"llama-2-13b": {"attention": [1, 1], "mlp": []}}, "layer 1 is listed more than once"),
        ({"llama-2-13b": {"attention": ["1"], "mlp": []}}, "it should be a whole number"),
    ],
)
def test_a_file_that_is_none_is_refused_with_file_and_key(
    tmp_path: Path, data: object, rule: str
) -> None:
    path = skip_sets(tmp_path, data)
    with pytest.raises(ProfileError, match=rule) as caught:
        import_skip_sets(path)
    assert str(caught.value).startswith(f"{path}")


@pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published files are not beside the checkout"
)
@pytest.mark.parametrize(("name", "count"), [("draft_and_verify", 4), ("swift", 5)])
def test_the_published_files_import_and_survive_the_round_trip(name: str, count: int) -> None:
    profiles = import_skip_sets(PUBLISHED / f"skip_layers_{name}.json")
    assert len({profile_path(profile) for profile in profiles}) == count
    for profile in profiles:
        assert parse_profile(dump_profile(profile).encode(), "x.yaml") == profile
        assert 0.3 < profile.mask.n_skipped / (2 * profile.model.n_layers) < 0.6
