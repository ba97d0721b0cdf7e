"""Write studies and a profile as one HTML page that needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skipsearch import __version__
from skipsearch.core.files import check_writable, save_file
from skipsearch.errors import ExportError
from skipsearch.profile import Profile
from skipsearch.profile.show import describe_profile
from skipsearch.report.figure import MissingData, as_speedup, format_number, strip_unprintable
from skipsearch.report.search_figures import check_comparable
from skipsearch.report.sections import Section, list_sections
from skipsearch.report.study_reader import StudyRecord
from skipsearch.report.theme import css_variables

SUMMARY_COLUMNS = (
    "study",
    "searchers",
    "masks judged",
    "left out",
    "best predicted",
    "it skips",
    "α",
    "τ",
    "β",
    "recipe",
    "measured on hold-out",
)
# Key of a study's identity -> its name on the page.
IDENTITY_LABELS = {
    "model": "model",
    "n_layers": "layers",
    "dtype": "dtype",
    "quantization": "weights",
    "task": "task",
    "device": "device",
    "engine": "engine",
    "objective": "objective",
}


@dataclass(frozen=True)
class RenderedSection:
    """A section for the template: a figure with its numbers, or the reason why it is missing."""

    section: Section
    svg: Markup | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    missing: str = ""  # why there is no figure


def write_report(
    out: str | Path,
    studies: Sequence[StudyRecord] = (),
    profile: Profile | None = None,
    replace: bool = False,
) -> list[str]:
    """Write the page; return the titles of the figures that could not be drawn.

    The page gives the reasons. out: is written atomically. replace: replace an existing file.
    Raises: ExportError if `out` cannot be written, or without matplotlib; SearchError for studies
    of two models.
    """
    target = Path(out)
    check_writable(target, replace, ExportError)
    html, missing = render_report(studies, profile)
    save_file(target, html, ExportError)
    return missing


def render_report(studies: Sequence[StudyRecord], profile: Profile | None) -> tuple[str, list[str]]:
    """Return (HTML page, titles of the figures that could not be drawn).

    The template escapes all text.
    """
    check_comparable(studies, profile)
    figures = [_render_section(section) for section in list_sections(studies, profile)]
    environment = Environment(
        loader=PackageLoader("skipsearch.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("page.html").render(
        title=_title(studies, profile),
        verdict=_verdict(studies, profile),
        facts=_facts(studies, profile),
        differing=_list_differences(studies, profile),
        columns=SUMMARY_COLUMNS,
        summary=[_summary_row(study) for study in studies],
        samples=[study.sample for study in studies if study.sample is not None],
        figures=figures,
        version=__version__,
        light=Markup(css_variables(dark=False)),
        dark=Markup(css_variables(dark=True)),
    )
    return strip_unprintable(html), [figure.section.title for figure in figures if figure.missing]


def _render_section(section: Section) -> RenderedSection:
    try:
        figure = section.draw()
    except MissingData as reason:
        return RenderedSection(section, missing=str(reason))
    return RenderedSection(
        section,
        Markup(figure.to_svg(f"{section.id}-title", f"{section.id}-words")),
        figure.columns,
        figure.rows,
    )


def _summary_row(study: StudyRecord) -> list[str]:
    best, winner = study.best, study.confirmed
    measured = "not recorded"
    if winner is not None:
        speedup = winner.speedup
        measured = f"{as_speedup(speedup.mean)} ({speedup.low:.2f}–{speedup.high:.2f})"
        if best is None or best.recipe != str(winner.recipe):
            measured += f" by {winner.recipe}"
    cells = ["", "", "", "", "", "" if winner is None else str(winner.recipe)]
    if best is not None:
        trial = best.trial
        cells = [
            f"{as_speedup(best.speedup)} ± {best.half_width:.2f}",
            f"{trial.mask.n_skipped} of {2 * study.n_layers}",
            format_number(trial.alpha),
            format_number(trial.tau),
            format_number(trial.beta),
            best.recipe,
        ]
    return [
        study.label,
        ", ".join(study.searchers),
        str(len(study.judged)),
        str(study.n_left_out),
        *cells,
        measured,
    ]


def _title(studies: Sequence[StudyRecord], profile: Profile | None) -> str:
    if profile is not None:
        return f"{profile.model.id} on {profile.task.name}"
    tasks = dict.fromkeys(str(study.identity.get("task")) for study in studies)
    if studies:
        return f"{studies[0].identity.get('model')} on {', '.join(tasks)}"
    return "nothing to show"


def _verdict(studies: Sequence[StudyRecord], profile: Profile | None) -> str:
    """Return the outcome in a sentence or two; empty if there is none."""
    if profile is not None and (measured := profile.measured) is not None:
        figure = f"{measured.speedup.format_with_unit('×')} as fast as plain decoding"
        where = f"on {measured.prompts} hold-out prompts, which the search had not seen"
        same = measured.lossless
        text = (
            f" On {same.identical} of {same.prompts} prompts the text was identical."
            if same.prompts
            else ""
        )
        if same.first_divergence_logit_gap is not None:
            text += (
                " Where it was not, the two likeliest tokens were at most "
                f"{same.first_divergence_logit_gap:g} apart in logits at "
                "the first difference: a pass over several rows rounds otherwise than one over a "
                "single row."
            )
        if profile.verdict == "speculate":
            return (
                f"Drafting pays: decoding with this profile is {figure} (95 % interval in "
                f"brackets), measured {where}.{text}"
            )
        return (
            f"Drafting does not pay here: the best recipe was {figure} {where}. With this profile "
            f"decoding is plain.{text}"
        )
    if profile is not None:
        return (
            "This profile was never measured: decoding with it is lossless, and its speed is "
            "unknown."
        )
    best = max(
        (study.best for study in studies if study.best is not None),
        key=lambda judged: judged.speedup,
        default=None,
    )
    if best is None:
        return "No mask has been judged yet." if studies else ""
    judged = sum(len(study.judged) for study in studies)
    return (
        f"The best of {judged} judged masks is predicted to decode {as_speedup(best.speedup)} as "
        "fast as plain decoding."
    )


def _facts(
    studies: Sequence[StudyRecord], profile: Profile | None
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the fact tables of the page: (heading, [(name, value), …]).

    If there are several studies, only facts that are equal in all of them are listed.
    """
    facts = []
    if studies:
        shared = [
            (name, str(value))
            for key, name in IDENTITY_LABELS.items()
            if (value := studies[0].identity.get(key)) is not None
            and all(study.identity.get(key) == value for study in studies)
        ]
        facts.append(("The search" if len(studies) == 1 else "The searches", shared))
    if profile is not None:
        facts.append(
            ("The profile", [(line[:9].strip(), line[9:]) for line in describe_profile(profile)])
        )
    return facts


def _list_differences(studies: Sequence[StudyRecord], profile: Profile | None) -> list[str]:
    """Return one line for each condition in which the studies and the profile differ."""
    conditions = [
        (study.label, {key: str(value) for key, value in study.identity.items()})
        for study in studies
    ]
    if profile is not None:
        identity = {
            "task": profile.task.name,
            "dtype": profile.model.dtype,
            "engine": profile.engine,
        }
        conditions.append(
            ("the profile", {k: str(value) for k, value in identity.items() if value})
        )
    keys = dict.fromkeys(key for _, identity in conditions for key in identity)
    differences = []
    for key in keys:
        values = [(name, identity[key]) for name, identity in conditions if key in identity]
        if len({value for _, value in values}) > 1:
            differences.append(f"{key}: {'; '.join(f'{name} {value}' for name, value in values)}")
    return differences
