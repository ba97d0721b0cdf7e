"""The page as a person gets it: opened from disk in headless Chromium, every figure drawn, nothing
complained about, nothing fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.profiles import GOLDEN

from report.studies import make_study
from skipsearch.profile import load_profile
from skipsearch.profile.schema import DrafterCounts
from skipsearch.report import write_report
from skipsearch.report.study_reader import read_studies
from skipsearch.report.theme import COLOURS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAYERS = 16
FIGURES = (
    "convergence",
    "skipped",
    "predicted",
    "layers",
    "reads",
    "times",
    "drafters",
    "certainty",
)
# Of a group of marks: how many lie in their figure and have a size there.
VISIBLE = """selector => {
  const outside = document.querySelector(selector).closest('svg').getBoundingClientRect();
  const isInside = r => r.width + r.height > 0
                        && r.left >= outside.left - 1 && r.right <= outside.right + 1
                        && r.top >= outside.top - 1 && r.bottom <= outside.bottom + 1;
  const marks = [...document.querySelectorAll(`${selector} :is(use, path):not(defs *)`)];
  return marks.filter(mark => isInside(mark.getBoundingClientRect())).length;
}"""


@dataclass
class Opened:
    """A page, and what the browser had to say about it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def marks(self, group: str) -> int:
        return int(self.page.evaluate(VISIBLE, f"#{group}"))


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    pages = []

    def open_page(path: Path, **context: Any) -> Opened:
        found = Opened(browser.new_page(**context))
        pages.append(found.page)
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on(
            "requestfailed", lambda request: found.complaints.append(f"failed: {request.url}")
        )
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri())
        return found

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every figure."""
    folder = tmp_path_factory.mktemp("full")
    make_study(folder / "both.journal", n_layers=LAYERS, failed=1)
    out, profile = folder / "report.html", load_profile(GOLDEN / "v3_speculate.yaml")
    assert profile.measured is not None
    counted = profile.measured.model_copy(
        update={"by_drafter": (DrafterCounts(kind="skip", rounds=9, drafted=30, accepted=20),)}
    )
    assert (
        write_report(
            out,
            read_studies([folder / "both.journal"]),
            profile.model_copy(update={"measured": counted}),
        )
        == []
    )
    return out


def test_every_figure_is_drawn_with_the_marks_of_its_data(full: Path, opened: Open) -> None:
    found = opened(full)
    for figure in FIGURES:
        box = found.page.locator(f"#figure-{figure} svg").bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 50
    expected = {
        "convergence-trials-0-0": 5,
        "convergence-trials-0-1": 12,
        "convergence-trials-1-0": 5,
        "convergence-trials-1-1": 12,
        "convergence-best-0-0": 1,
        "convergence-best-1-0": 1,
        "skipped-trials-0": 5,
        "skipped-trials-1": 12,
        "skipped-best": 1,
        "predicted-raced-0": 2,
        "predicted-raced-1": 1,
        "predicted-raced-2": 1,
        "predicted-intervals-0": 2,
        "predicted-diagonal": 1,
        "layers-cells": 4 * 2 * LAYERS,
        "reads-format-0": 2,
        "reads-format-1": 2,
        "reads-format-2": 2,
        "times-bar-0": 1,
        "times-bar-1": 1,
        "drafters-drafted-0": 1,
        "drafters-accepted-0": 1,
        "certainty-group-0-1": 1,
        "certainty-group-1-9": 1,
    }
    assert {group: found.marks(group) for group in expected} == expected


def test_the_browser_complains_about_nothing_and_fetches_nothing_else(
    full: Path, opened: Open
) -> None:
    found = opened(full)
    assert found.complaints == []
    assert found.requests == [full.as_uri()]


def test_the_numbers_unfold_below_each_figure(full: Path, opened: Open) -> None:
    page = opened(full).page
    for figure in FIGURES:
        table = page.locator(f"#figure-{figure} details table")
        assert not table.is_visible()
        page.locator(f"#figure-{figure} summary").click()
        assert table.is_visible()
    assert page.locator("#figure-convergence tbody tr").count() == 17


def test_a_screen_reader_is_told_what_each_figure_is(full: Path, opened: Open) -> None:
    page = opened(full).page
    for title in (
        "Convergence by searcher",
        "Speedup against skipped sub-layers",
        "Predicted against measured",
        "Layer map by searcher",
        "Time a token",
        "What each drafter contributed",
        "How often drafts are right",
    ):
        assert page.get_by_role("heading", name=title).count() == 1
        assert page.get_by_role("img", name=title).count() == 1


@pytest.mark.parametrize(
    ("scheme", "medium", "dark"),
    [("light", "screen", False), ("dark", "screen", True), ("dark", "print", False)],
)
def test_figures_follow_the_page_into_the_dark_and_onto_paper(
    scheme: Any, medium: Any, dark: bool, full: Path, opened: Open
) -> None:
    page = opened(full, color_scheme=scheme).page
    page.emulate_media(media=medium)
    colour = "selector => getComputedStyle(document.querySelector(selector))"
    rgb = {
        name: "rgb({}, {}, {})".format(*bytes.fromhex(pair[dark][1:]))
        for name, pair in COLOURS.items()
    }
    assert page.evaluate(f"({colour})('body').backgroundColor") == rgb["paper"]
    assert page.evaluate(f"({colour})('body').color") == rgb["ink"]
    assert page.evaluate(f"({colour})('#convergence-trials-0-0 use').fill") == rgb["s0"]


@pytest.mark.parametrize("width", [360, 1000])
def test_on_a_narrow_screen_figures_scroll_and_the_page_does_not(
    width: int, full: Path, opened: Open
) -> None:
    page = opened(full, viewport={"width": width, "height": 700}).page
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelector('#figure-layers .wide').scrollWidth") >= 600


EVIL = (
    "</title></svg></script><script>document.title = 'owned'</script>"
    "<img src=x onerror=\"document.title = 'owned'\">"
)


def test_what_a_file_says_is_shown_as_text_and_never_run(tmp_path: Path, opened: Open) -> None:
    text = (
        (GOLDEN / "v3_speculate.yaml")
        .read_text()
        .replace("name: NVIDIA H200", f"name: '{EVIL.replace(chr(39), chr(39) * 2)}'")
    )
    (tmp_path / "evil.yaml").write_text(
        text.replace("id: demo", "id: <b onclick=alert(1)>demo</b>")
    )
    path = tmp_path / "<img src=x onerror=alert(1)>.journal"
    make_study(
        path,
        {EVIL: 3, "gp": 2},
        n_layers=LAYERS,
        task=EVIL,
        device=EVIL,
        model="<b onclick=alert(1)>demo</b>",
    )
    write_report(tmp_path / "evil.html", read_studies([path]), load_profile(tmp_path / "evil.yaml"))
    found = opened(tmp_path / "evil.html")
    assert found.complaints == []
    assert found.requests == [(tmp_path / "evil.html").as_uri()]
    assert found.page.title() == "skipsearch: <b onclick=alert(1)>demo</b> on pycode"
    assert (
        found.page.locator("script, img, iframe, b, body > title, [onclick], [onerror]").count()
        == 0
    )
    assert EVIL in found.page.locator("main").inner_text()
    assert found.marks("convergence-trials-0-0") == 3


def test_a_page_of_two_running_searches_draws_what_they_hold_and_says_what_they_lack(
    tmp_path: Path, opened: Open
) -> None:
    for seed, name in enumerate(("one", "two")):
        make_study(
            tmp_path / f"{name}.journal", {"gp": 7 + seed}, ended=False, seed=seed, device=name
        )
    missing = write_report(
        tmp_path / "report.html", read_studies([tmp_path / "one.journal", tmp_path / "two.journal"])
    )
    assert missing == [
        "Predicted against measured",
        "Time a token",
        "What each drafter contributed",
        "How often drafts are right",
    ]
    found = opened(tmp_path / "report.html")
    assert found.complaints == []
    assert [found.marks(f"convergence-trials-0-{k}") for k in (0, 1)] == [7, 8]
    assert "device: one one; two two" in found.page.locator("main").inner_text()
    for figure, sentence in (
        ("predicted", "This study holds no race"),
        ("times", "with --profile"),
    ):
        assert sentence in found.page.locator(f"#missing-{figure}").inner_text()
        assert found.page.locator(f"#figure-{figure}").count() == 0
