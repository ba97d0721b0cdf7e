"""`skipsearch report`: draw a search and its profile, in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.options import require_usage


def report(
    profile: Annotated[
        Path | None,
        typer.Argument(metavar="PROFILE", help="A profile. The journal next to it is drawn too."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="The page to write. Default: next to the profile or journal."
        ),
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|URL",
            help="A search's journal or database URL. May be repeated, to compare searches. "
            "Default: the journal next to the profile.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> None:
    """Example: skipsearch report my-profile.yaml

    Draw a search and its profile as one HTML file that needs no network: the verdict, how the
    searchers converged, speedup against skipped sub-layers, predicted against measured, which
    layers are skipped, how the settings matter, and what each drafter brought. Studies are only
    read, so a search may still be running in them."""
    require_usage(bool(study or profile), "name a profile, or a search with --study")
    if profile and not study and (journal := profile.with_suffix(".journal")).is_file():
        study = [str(journal)]
    from skipsearch.cli.consoles import err
    from skipsearch.cli.consoles import out as console
    from skipsearch.core.files import check_writable
    from skipsearch.errors import ExportError
    from skipsearch.profile import load_profile
    from skipsearch.report.report_page import write_report
    from skipsearch.report.study_reader import read_studies
    from skipsearch.tuning.storage import study_file

    studies = [file for file in map(study_file, study or []) if file]
    sources = [*([profile] if profile else []), *studies]
    require_usage(bool(out or sources), "say with --out where to write the page")
    out = out or sources[0].with_suffix(".html")
    check_writable(
        out,
        force,
        ExportError,
        inputs={"PROFILE": [profile] if profile else [], "--study": studies},
    )
    loaded = load_profile(profile) if profile else None
    missing = write_report(out, read_studies(study or []), loaded, force)
    if missing:
        err.print(f"not drawn, and the page says why: {', '.join(missing)}", style="dim")
    console.print(f"{out}: open it in a browser")
