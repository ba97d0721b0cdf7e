"""Every figure holds the marks and the numbers of what it is given, as an SVG that can stand
anywhere in a page, or as a picture.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.profiles import GOLDEN, write_demo_profile

from report.studies import BROUGHT, LOOKUP, RACED, make_study
from skipsearch.core.mask import format_sublayer_count
from skipsearch.errors import ExportError, SearchError
from skipsearch.profile import Profile, load_profile
from skipsearch.report import (
    MissingData,
    ReportFigure,
    StudyRecord,
    draw_convergence,
    draw_drafters,
    draw_layer_map,
    draw_predictions,
    draw_readings,
    draw_reliability,
    draw_speedup_by_skipped,
    draw_token_times,
    read_study,
)
from skipsearch.report.layer_map import build_map_rows
from skipsearch.report.profile_figures import drafted_per_round, speedup_from_counts
from skipsearch.report.search_figures import collect_predictions
from skipsearch.report.theme import COLOURS

LAYERS = 16  # of the golden profile
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    path = tmp_path_factory.mktemp("study") / "both.journal"
    make_study(path, n_layers=LAYERS)
    return read_study(path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    path = tmp_path_factory.mktemp("study") / "running.journal"
    make_study(path, {"gp": 6}, ended=False, seed=1, n_layers=LAYERS)
    return read_study(path)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of one skip drafter, which nobody counted."""
    return load_profile(GOLDEN / "v3_speculate.yaml")


@pytest.fixture(scope="module")
def mixed() -> Profile:
    """Of lookup and skip, counted."""
    return load_profile(GOLDEN / "v3_mixed.yaml")


@pytest.fixture(scope="module")
def svgs(study: StudyRecord, profile: Profile, mixed: Profile) -> list[str]:
    """Every figure."""
    figures = [
        draw_convergence([study]),
        draw_speedup_by_skipped([study]),
        draw_predictions([study], profile),
        draw_layer_map([study], profile),
        draw_token_times(profile),
        draw_drafters(mixed),
        draw_reliability(study),
    ]
    return [drawn.to_svg("t", "d") for drawn in figures]


def parsed(drawn: ReportFigure) -> ElementTree.Element:
    return ElementTree.fromstring(drawn.to_svg("t", "d"))


def marks(root: ElementTree.Element, id: str) -> list[ElementTree.Element]:
    group = next(g for g in root.iter(f"{SVG}g") if g.get("id") == id)
    shapes = {shape for definitions in group.iter(f"{SVG}defs") for shape in definitions.iter()}
    return [e for e in group.iter() if e.tag in (f"{SVG}use", f"{SVG}path") and e not in shapes]


# --- what is drawn


def test_convergence_of_one_search_tells_its_searchers_apart_over_masks_and_over_seconds(
    study: StudyRecord,
) -> None:
    drawn = draw_convergence([study])
    root = parsed(drawn)
    for panel in (0, 1):
        assert [len(marks(root, f"convergence-trials-{panel}-{k}")) for k in (0, 1)] == [5, 12]
        assert len(marks(root, f"convergence-best-{panel}-0")) == 1
    assert len(drawn.rows) == 17
    assert drawn.rows[-1][drawn.columns.index("best so far")] == f"{study.best.speedup:.3f}×"


def test_convergence_of_two_searches_tells_them_apart(
    study: StudyRecord, running: StudyRecord
) -> None:
    root = parsed(draw_convergence([study, running]))
    for panel in (0, 1):
        assert [len(marks(root, f"convergence-trials-{panel}-{k}")) for k in (0, 1)] == [17, 6]


def test_speedup_by_skipped_has_a_point_a_mask_and_joins_the_best(study: StudyRecord) -> None:
    drawn = draw_speedup_by_skipped([study])
    assert sum(len(marks(parsed(drawn), f"skipped-trials-{k}")) for k in (0, 1)) == 17
    best = {int(row[0]): row[2] for row in drawn.rows}
    assert best[study.best.trial.mask.n_skipped] == f"{study.best.speedup:.3f}×"
    assert sum(int(row[1]) for row in drawn.rows) == 17


def test_predicted_against_measured_has_the_race_the_hold_out_and_the_profile(
    study: StudyRecord, profile: Profile
) -> None:
    points = collect_predictions([study], profile)
    assert [(p.predicted, p.measured.mean) for p in points[:3]] == [
        (1.31, 1.27),
        (1.22, 0.97),
        (1.31, 1.24),
    ]
    assert points[3].origin.startswith("profile")
    root = parsed(draw_predictions([study], profile))
    assert [len(marks(root, f"predicted-raced-{k}")) for k in (0, 1, 2)] == [2, 1, 1]
    assert [len(marks(root, f"predicted-intervals-{k}")) for k in (0, 1, 2)] == [2, 1, 1]


def test_what_a_profile_s_counts_come_to_is_tokens_a_round_over_the_price_of_a_round(
    profile: Profile,
) -> None:
    found = profile.measured
    assert found is not None
    drafted = drafted_per_round(profile)
    assert drafted == pytest.approx((3.42 - 1) / 0.81)
    assert speedup_from_counts(profile) == pytest.approx(3.42 / (drafted * 0.52 + 1.18))


def test_the_layer_map_has_two_rows_of_cells_a_searcher_the_winner_s_and_the_profile_s(
    study: StudyRecord, profile: Profile
) -> None:
    rows = build_map_rows([study], profile)
    assert [row.name for row in rows] == ["sensitivity", "gp", "winner", "profile"]
    assert all(0 <= share <= 1 for row in rows for share in row.skipped_share)
    assert rows[1].count == 5
    winner = study.mask_of(study.race[-1])
    assert winner is not None
    assert rows[2].skipped_share == tuple(float(bit) for bit in winner.bits)
    assert rows[3].skipped_share == tuple(float(bit) for bit in profile.mask.bits)
    assert len(marks(parsed(draw_layer_map([study], profile)), "layers-cells")) == 4 * 2 * LAYERS


def test_a_profile_s_figures_have_its_measurement(profile: Profile) -> None:
    assert [len(marks(parsed(draw_token_times(profile)), f"times-bar-{k}")) for k in (0, 1)] == [
        1,
        1,
    ]


def test_what_each_drafter_brought_is_a_bar_of_accepted_in_one_of_drafted_tokens(
    mixed: Profile,
) -> None:
    drawn = draw_drafters(mixed)
    root = parsed(drawn)
    assert [
        len(marks(root, f"drafters-{gid}-{k}")) for gid in ("drafted", "accepted") for k in (0, 1)
    ] == [1] * 4
    first = "1. lookup: 2 tokens must match, copies up to 16, at most 4 per matched token"
    assert [[*row] for row in drawn.rows] == [
        [first, "400", "3200", "1900", "59%"],
        ["2. skip 3 sub-layers, adaptive 0.6 for 0.9, up to 8", "700", "2100", "1500", "71%"],
    ]
    (tip,) = [mark[0].text for mark in marks(root, "drafters-accepted-1")]
    assert (
        tip == "2. skip 3 sub-layers, adaptive 0.6 for 0.9, up to 8: 1500 of 2100 drafted tokens "
        "accepted, in 700 rounds"
    )


def test_a_drafter_that_never_drafted_is_shown_too(mixed: Profile) -> None:
    assert mixed.measured is not None
    idle = mixed.measured.by_drafter[0].model_copy(
        update={"rounds": 0, "drafted": 0, "accepted": 0}
    )
    measured = mixed.measured.model_copy(
        update={"by_drafter": (idle, mixed.measured.by_drafter[1])}
    )
    drawn = draw_drafters(mixed.model_copy(update={"measured": measured}))
    assert [*drawn.rows[0]][1:] == ["0", "0", "0", "never asked, or had nothing to say"]
    assert parsed(drawn).tag == f"{SVG}svg"


def test_what_has_no_mask_has_no_row_in_the_layer_map(mixed: Profile, tmp_path: Path) -> None:
    lookups = mixed.model_copy(update={"drafters": mixed.drafters[:1]})
    with pytest.raises(MissingData, match=r"skips no sub-layers: it drafts with lookup\."):
        draw_layer_map([], lookups)
    make_study(
        tmp_path / "a.journal",
        {"gp": 2},
        raced=[entry | {"recipe": [LOOKUP]} for entry in RACED],
        n_layers=LAYERS,
    )
    study = read_study(tmp_path / "a.journal")
    assert [row.name for row in build_map_rows([study], lookups)] == ["gp"]
    assert [(p.n_skipped, p.recipe) for p in collect_predictions([study])] == [
        (0, "lookup: 2 tokens must match, copies up to 8")
    ] * 3


def test_one_mask_is_enough(tmp_path: Path) -> None:
    make_study(tmp_path / "a.journal", {"gp": 1}, raced=RACED[:1])
    study = read_study(tmp_path / "a.journal")
    for drawn in (
        draw_convergence([study]),
        draw_speedup_by_skipped([study]),
        draw_predictions([study]),
        draw_layer_map([study]),
    ):
        assert parsed(drawn).tag == f"{SVG}svg"


def test_how_often_drafts_are_right_has_a_bar_a_group_and_a_panel_a_drafter(
    study: StudyRecord,
) -> None:
    drawn = draw_reliability(study)
    assert [row[:2] for row in drawn.rows[:3]] == [
        ["1. by match length", "2"],
        ["1. by match length", "6–7"],
        ["2. by confidence", "0.0–0.1"],
    ]
    assert drawn.rows[1][2:] == ["30", "27", "90%"]
    assert len(drawn.rows) == len(drawn.tips) == len(BROUGHT)


# --- what cannot be


@pytest.mark.parametrize(
    "draw",
    [
        lambda running, profile: draw_convergence([]),
        lambda running, profile: draw_speedup_by_skipped([]),
        lambda running, profile: draw_predictions([running]),
        lambda running, profile: draw_predictions([], profile),
        lambda running, profile: draw_layer_map([]),
        lambda running, profile: draw_token_times(None),
        lambda running, profile: draw_token_times(profile),
        lambda running, profile: draw_drafters(None),
        lambda running, profile: draw_reliability(None),
        lambda running, profile: draw_reliability(running),
        lambda running, profile: draw_drafters(profile),
        lambda running, profile: draw_drafters(load_profile(GOLDEN / "v3_plain.yaml")),
        lambda running, profile: draw_drafters(load_profile(GOLDEN / "v3_speculate.yaml")),
        lambda running, profile: draw_layer_map([], load_profile(GOLDEN / "v3_plain.yaml")),
    ],
)
def test_a_figure_says_what_it_needs(
    draw: Callable[[StudyRecord, Profile], ReportFigure], running: StudyRecord, tmp_path: Path
) -> None:
    with pytest.raises(MissingData) as raised:
        draw(running, load_profile(write_demo_profile(tmp_path / "unmeasured.yaml")))
    assert str(raised.value).endswith(".")


def test_searches_of_two_models_are_not_compared(
    study: StudyRecord, tmp_path: Path, profile: Profile
) -> None:
    make_study(tmp_path / "small.journal", {"gp": 2}, model="small")
    small = read_study(tmp_path / "small.journal")
    with pytest.raises(
        SearchError,
        match=r"both is of demo \(16 layers\) and small of small \(6 layers\): a report compares",
    ):
        draw_convergence([study, small])
    with pytest.raises(
        SearchError, match=r"small is of small \(6 layers\) and the profile of demo \(16 layers\)"
    ):
        draw_layer_map([small], profile)


def test_without_matplotlib_one_sentence_says_how_to_get_it(
    study: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ExportError, match="needs matplotlib, which is not installed: pip install matplotlib"
    ):
        draw_convergence([study])


# --- an SVG for the middle of a page


def test_no_two_figures_share_an_id_and_every_reference_stays_in_its_own(svgs: list[str]) -> None:
    seen: set[str] = set()
    for svg in svgs:
        ids = [e.attrib["id"] for e in ElementTree.fromstring(svg).iter() if "id" in e.attrib]
        assert len(set(ids)) == len(ids)
        assert not seen & {*ids}
        seen |= {*ids}
        references = [*re.findall(r'href="([^"]*)"', svg), *re.findall(r"url\(([^)]*)\)", svg)]
        assert references
        assert {*references} <= {f"#{id}" for id in ids}


def test_it_is_named_and_described_by_the_page_and_brings_no_style_of_its_own(
    svgs: list[str],
) -> None:
    for root in map(ElementTree.fromstring, svgs):
        assert (root.get("role"), root.get("aria-labelledby"), root.get("aria-describedby")) == (
            "img",
            "t",
            "d",
        )
        assert {e.tag.removeprefix(SVG) for e in root.iter()} <= {
            "svg",
            "g",
            "defs",
            "clipPath",
            "rect",
            "path",
            "use",
            "text",
            "title",
        }


def test_every_colour_is_one_of_the_page_s(svgs: list[str]) -> None:
    """A colour of its own would not follow the page into the dark."""
    for svg in svgs:
        assert {*re.findall(r"var\(--(\w+)\)", svg)} <= COLOURS.keys()
        assert not re.search(r"(fill|stroke): (#|rgb)", svg)
        assert all("fill: var(" in text for text in re.findall("<text [^>]*>", svg))
    assert len({light for light, _ in COLOURS.values()}) == len(COLOURS)


def test_the_same_study_gives_the_same_bytes(study: StudyRecord) -> None:
    assert draw_convergence([study]).to_svg("t", "d") == draw_convergence([study]).to_svg("t", "d")


def test_every_mark_says_what_it_is_under_the_pointer(study: StudyRecord) -> None:
    said = [
        mark[0].text for mark in marks(parsed(draw_convergence([study])), "convergence-trials-0-1")
    ]
    own = [j for j in study.judged if j.searcher == "gp"]
    assert said == [
        f"gp: {j.speedup:.2f}×, {j.trial.mask.n_skipped} skipped, α 0.80, τ 2.10, β "
        f"{j.trial.beta:.2f}, "
        "lookup: 2 tokens must match, copies up to 8; skip "
        f"{format_sublayer_count(j.trial.mask.n_skipped)}, confidence 0.4, up to 6"
        for j in own
    ]


def test_a_notebook_shows_a_picture(study: StudyRecord) -> None:
    assert draw_convergence([study])._repr_png_().startswith(b"\x89PNG")


# --- names that are not what a figure hopes for


class Elements(HTMLParser):
    """The elements of a text, as a browser would make them."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def __iter__(self) -> Iterator[tuple[str, dict[str, str | None]]]:
        return iter(self.found)


STRANGE = [
    "<script>alert(1)</script>",
    "$\\frac{1",
    "\"'><img src=x onerror=alert(1)>",
    "]]><script>",
    "nul \x00 and \x1b[31m",
    "搜索者 🦊",
    "\ufffe",
    "a" * 500,
    "two\nlines",
    "_hidden",
    " ",
    'url(#x) id="y"',
    "#1f2328",
]


def test_any_name_is_only_text(tmp_path: Path) -> None:
    make_study(tmp_path / "a.journal", {**dict.fromkeys(STRANGE, 1), "gp": 1})
    studies = [read_study(tmp_path / "a.journal", label=name) for name in STRANGE]
    for drawn in (
        draw_convergence(studies),
        draw_convergence(studies[:1]),
        draw_predictions(studies[:1]),
        draw_layer_map(studies[:1]),
    ):
        svg = drawn.to_svg("t", "d")
        ElementTree.fromstring(svg)
        tags = {tag for tag, _ in Elements(svg)}
        assert tags <= {"svg", "g", "defs", "clippath", "rect", "path", "use", "text", "title"}
        assert not [
            key for _, attributes in Elements(svg) for key in attributes if key.startswith("on")
        ]


def test_what_drafts_read_is_drawn_by_memory_and_speed(study: StudyRecord) -> None:
    figure = draw_readings(study)
    assert len(figure.rows) == len(study.readings) == 6
    speedups = [float(row[-1].rstrip("×")) for row in figure.rows]
    assert speedups == sorted(speedups, reverse=True)
    assert set(figure.tips) == {"format-0", "format-1", "format-2"}
    assert ElementTree.fromstring(figure.to_svg("a", "b")).tag == f"{SVG}svg"


def test_a_study_without_formats_says_why_it_has_no_such_figure(running: StudyRecord) -> None:
    with pytest.raises(MissingData, match="compared no number formats"):
        draw_readings(running)
