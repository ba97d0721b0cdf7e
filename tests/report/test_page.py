"""What a reader of the page meets first: the verdict, and what the words of the page mean."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest
from helpers.profiles import GOLDEN

from skipsearch.profile import load_profile
from skipsearch.report.report_page import render_report
from skipsearch.report.study_reader import read_study

from .studies import LAYERS, make_study


def first_sentence(html: str) -> str:
    found = html.partition('<p class="verdict">')[2].partition("</p>")[0]
    return unescape(found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "speculate",
            "Drafting pays: decoding with this profile is 1.337× (1.310–1.366) as fast as plain "
            "decoding",
        ),
        (
            "lost",
            "Drafting does not pay here: the best recipe was 0.97× (0.95–0.99) as fast as plain "
            "decoding",
        ),
        (
            "unmeasured",
            "This profile was never measured: decoding with it is lossless, and its speed is "
            "unknown.",
        ),
    ],
)
def test_it_opens_with_the_profiles_verdict(name: str, said: str) -> None:
    html, _ = render_report([], load_profile(GOLDEN / f"v3_{name}.yaml"))
    assert first_sentence(html).startswith(said)
    assert html.index('class="verdict"') < html.index("Summary")


def test_without_a_profile_it_opens_with_what_the_search_predicts(tmp_path: Path) -> None:
    make_study(tmp_path / "one.journal", n_layers=LAYERS)
    study = read_study(tmp_path / "one.journal")
    assert study.best is not None
    html, _ = render_report([study], None)
    assert first_sentence(html) == (
        f"The best of {len(study.judged)} judged masks is predicted to decode "
        f"{study.best.speedup:.2f}× as fast as plain decoding."
    )


def test_terms_are_explained_before_the_first_table_and_figure(tmp_path: Path) -> None:
    make_study(tmp_path / "one.journal", n_layers=LAYERS)
    html, _ = render_report([read_study(tmp_path / "one.journal")], None)
    for term in ("α: ", "τ: ", "β: ", "v: "):
        assert 0 < html.index(term) < html.index("<table>") < html.index("<figure")
