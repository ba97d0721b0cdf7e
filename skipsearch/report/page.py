"""`write_report`: studies and a profile as one HTML file that needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from skipsearch.errors import ExportError
from skipsearch.profile import Profile
from skipsearch.profile.describe import describe
from skipsearch.profile.dump import check_writable, save_text
from skipsearch.report.drawn import NothingToDraw, clean, number, times
from skipsearch.report.methods import Table
from skipsearch.report.searches import check_comparable
from skipsearch.report.sections import Section, sections
from skipsearch.report.study import Study
from skipsearch.report.theme import css_variables
from skipsearch.version import __version__

SUMMARY = ("study", "searchers", "masks judged", "left out", "best predicted", "it skips", "α", "τ", "β", "recipe", "measured on hold-out")
SAID = {"model": "model", "n_layers": "layers", "dtype": "dtype", "quantization": "weights", "task": "task", "device": "device",
        "engine": "engine", "objective": "objective"}   # of a study's identity, and what the page calls it


@dataclass(frozen=True)
class Shown:
    """A section as the template reads it: a figure with its numbers or, without an svg, why there is none."""

    section: Section
    svg: Markup | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    missing: str = ""


def write_report(out: str | Path, studies: Sequence[Study] = (), profile: Profile | None = None, replace: bool = False,
                 tables: Sequence[Table] = ()) -> list[str]:
    """Write the page; returns the titles of the figures that could not be drawn, for which the page says why.

    out: a reader sees the old file or the new one, never a part. replace: there may be an old one.
    Raises: ExportError if `out` cannot be written, or without matplotlib; SearchError for studies of two models.
    """
    target = Path(out)
    check_writable(target, replace, ExportError)
    html, missing = render(studies, profile, tables)
    save_text(html, target, ExportError)
    return missing


def render(studies: Sequence[Study], profile: Profile | None, tables: Sequence[Table] = ()) -> tuple[str, list[str]]:
    """The page, and the titles of the figures that could not be drawn. Text is escaped by the template, where it is put in."""
    check_comparable(studies, profile)
    figures = [_shown(section) for section in sections(studies, profile, tables)]
    environment = Environment(loader=PackageLoader("skipsearch.report", "."), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    html = environment.get_template("page.html").render(
        title=_title(studies, profile, tables), verdict=_verdict(studies, profile), facts=_facts(studies, profile),
        differing=_differing(studies, profile), columns=SUMMARY,
        summary=[_summary(study) for study in studies], figures=figures, version=__version__,
        light=Markup(css_variables(dark=False)), dark=Markup(css_variables(dark=True)))
    return clean(html), [figure.section.title for figure in figures if figure.missing]


def _shown(section: Section) -> Shown:
    try:
        drawn = section.draw()
    except NothingToDraw as reason:
        return Shown(section, missing=str(reason))
    return Shown(section, Markup(drawn.svg(f"{section.id}-title", f"{section.id}-words")), drawn.columns, drawn.rows)


def _summary(study: Study) -> list[str]:
    best, held = study.best, study.confirmed
    about = ["", "", "", "", "", "" if held is None else str(held)]
    if best is not None:
        trial = best.trial
        about = [f"{times(best.speedup)} ± {best.half_width:.2f}", f"{trial.mask.n_skipped} of {2 * study.n_layers}", number(trial.alpha),
                 number(trial.tau), number(trial.beta), best.recipe]
    return [study.label, ", ".join(study.searchers), str(len(study.judged)), str(study.left_out), *about,
            f"{times(held.speedup.mean)} ({held.speedup.low:.2f}–{held.speedup.high:.2f})" if held else "not recorded"]


def _title(studies: Sequence[Study], profile: Profile | None, tables: Sequence[Table]) -> str:
    if profile is not None:
        return f"{profile.model.id} on {profile.task.name}"
    tasks = dict.fromkeys(str(study.identity.get("task")) for study in studies)
    if studies:
        return f"{studies[0].identity.get('model')} on {', '.join(tasks)}"
    return ", ".join(table.title for table in tables) or "nothing to show"


def _verdict(studies: Sequence[Study], profile: Profile | None) -> str:
    """What came out, in a sentence or two; nothing where the page has only tables of methods."""
    if profile is not None and (measured := profile.measured) is not None:
        figure = f"{measured.speedup.in_words('×')} as fast as plain decoding"
        where = f"on {measured.prompts} hold-out prompts, which the search had not seen"
        same = measured.lossless
        text = f" On {same.identical} of {same.prompts} prompts the text was identical." if same.prompts else ""
        if profile.verdict == "speculate":
            return f"Drafting pays: decoding with this profile is {figure} (95 % interval in brackets), measured {where}.{text}"
        return f"Drafting does not pay here: the best recipe was {figure} {where}. With this profile decoding is plain.{text}"
    if profile is not None:
        return "This profile was never measured: decoding with it is lossless, and its speed is unknown."
    best = max((study.best for study in studies if study.best is not None), key=lambda judged: judged.speedup, default=None)
    if best is None:
        return "No mask has been judged yet." if studies else ""
    judged = sum(len(study.judged) for study in studies)
    return f"The best of {judged} judged masks is predicted to decode {times(best.speedup)} as fast as plain decoding."


def _facts(studies: Sequence[Study], profile: Profile | None) -> list[tuple[str, list[tuple[str, str]]]]:
    """Headings, each with what and what about it. Of several searches, what they share."""
    found = []
    if studies:
        shared = [(name, str(value)) for key, name in SAID.items() if (value := studies[0].identity.get(key)) is not None
                  and all(study.identity.get(key) == value for study in studies)]
        found.append(("The search" if len(studies) == 1 else "The searches", shared))
    if profile is not None:
        found.append(("The profile", [(line[:9].strip(), line[9:]) for line in describe(profile)]))
    return found


def _differing(studies: Sequence[Study], profile: Profile | None) -> list[str]:
    """What is shown together, was not made with the same, and what that is."""
    made = [(study.label, {key: str(value) for key, value in study.identity.items()}) for study in studies]
    if profile is not None:
        own = {"task": profile.task.name, "dtype": profile.model.dtype, "engine": profile.engine}
        made.append(("the profile", {key: str(value) for key, value in own.items() if value}))
    keys = dict.fromkeys(key for _, identity in made for key in identity)
    return [f"{key}: {'; '.join(f'{what} {identity[key]}' for what, identity in made if key in identity)}" for key in keys
            if len({identity[key] for _, identity in made if key in identity}) > 1]
