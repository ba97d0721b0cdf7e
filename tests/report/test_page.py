"""What a reader of the page meets first: the verdict, and what the words of the page mean."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from helpers.profiles import GOLDEN

from skipsearch.errors import SearchError
from skipsearch.profile import load_profile
from skipsearch.report.report_page import render_report
from skipsearch.report.study_reader import read_study

from .studies import LAYERS, SAMPLE, make_study


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


def test_a_sample_answer_says_which_drafter_wrote_what(tmp_path: Path) -> None:
    make_study(tmp_path / "one.journal", n_layers=LAYERS)
    html, _ = render_report([read_study(tmp_path / "one.journal")], None)
    answer = html.partition('<p class="answer">')[2].partition("</p>")[0]
    spans = re.findall(
        r'<span class="drafted" style="--drafter: var\((.*?)\)">(.*?)</span>', answer
    )
    assert spans == [("--s0", "1 &lt;"), ("--s1", "2")]
    assert unescape(re.sub("<.*?>", "", answer)) == "1 + 1 <= 2\n"
    assert html.index(">lookup</span>") < html.index(">skip</span>") < html.index(answer)


@pytest.mark.parametrize(
    "sample",
    [
        SAMPLE | {"rounds": [[2, "a", "b"]]},
        SAMPLE | {"rounds": [[0, "a" * 20_000, ""]]},
        SAMPLE | {"kinds": 3},
    ],
)
def test_a_sample_that_breaks_a_rule_is_refused(sample: Any, tmp_path: Path) -> None:
    make_study(tmp_path / "one.journal", n_layers=LAYERS, sample=sample)
    with pytest.raises(SearchError, match=r"the sample answer in .*one\.journal cannot be read"):
        read_study(tmp_path / "one.journal")


def test_a_study_without_a_sample_shows_none(tmp_path: Path) -> None:
    make_study(tmp_path / "one.journal", n_layers=LAYERS, sample=None)
    html, _ = render_report([read_study(tmp_path / "one.journal")], None)
    assert "sample answer" not in html
