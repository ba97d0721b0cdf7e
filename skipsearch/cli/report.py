"""`skipsearch report`: draw a search and its profile, in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.options import require_usage


def report(
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    study: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|URL",
            help="A search's journal or database URL. May be repeated, to compare searches.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A profile. Give --study too to see both.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> None:
    """Example: skipsearch report --study my-profile.journal --profile my-profile.yaml --out
    report.html

    Draw a search and its profile as one HTML file that needs no network: the verdict, how the
    searchers converged, speedup against skipped sub-layers, predicted against measured, which
    layers are skipped, how the settings matter, and what each drafter brought. Studies are only
    read, so a search may still be running in them."""
    require_usage(bool(study or profile), "give --study, --profile, or both")
    from skipsearch.cli.consoles import err
    from skipsearch.cli.consoles import out as console
    from skipsearch.core.files import check_writable
    from skipsearch.errors import ExportError
    from skipsearch.profile import load_profile
    from skipsearch.report.report_page import write_report
    from skipsearch.report.study_reader import read_studies
    from skipsearch.tuning.storage import study_file

    studies = [file for file in map(study_file, study or []) if file]
    check_writable(
        out,
        force,
        ExportError,
        inputs={"--profile": [profile] if profile else [], "--study": studies},
    )
    loaded = load_profile(profile) if profile else None
    missing = write_report(out, read_studies(study or []), loaded, force)
    if missing:
        err.print(f"not drawn, and the page says why: {', '.join(missing)}", style="dim")
    console.print(f"{out}: open it in a browser")
