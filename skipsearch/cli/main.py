"""`skipsearch`: the entry point that turns every expected failure into one sentence and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from skipsearch.cli.common import err
from skipsearch.cli.outside import visible
from skipsearch.errors import SkipSearchError
from skipsearch.version import __version__


@contextmanager
def _visible_mistakes() -> Iterator[None]:
    try:
        yield
    except typer.TyperException as mistake:
        if hasattr(mistake, "message"):
            mistake.message = visible(mistake.message)
        raise


class Root(TyperGroup):
    """The command that all others are called by. A wrong call quotes its arguments, which a shell may have made of any file's name."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _visible_mistakes():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _visible_mistakes():
            return super().invoke(ctx)


app = typer.Typer(
    name="skipsearch", cls=Root, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"max_content_width": 140},   # an example that is broken in two cannot be copied
    help="Example: skipsearch tune --model demo --task pycode\n\n"
         "Find the fastest lossless way to decode with a language model, and decode with it. Drafts come from prompt lookup, from the "
         "model with some of its sub-layers skipped, or from both.")


def _version(asked: bool) -> None:
    if asked:
        print(f"skipsearch {__version__}")
        raise typer.Exit


@app.callback()
def root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
         quiet: bool = typer.Option(False, "--quiet", "-q", help="Hide progress and remarks on stderr; warnings and errors stay."),
         debug: bool = typer.Option(False, "--debug", help="Show the traceback if something fails.")) -> None:
    err.quiet = quiet
    if debug:
        os.environ["SKIPSEARCH_DEBUG"] = "1"


def register() -> None:
    """Attach every command; each file holds one."""
    from skipsearch.cli import bench, catalogue, chat, decode, doctor, export, profile, report, serve, task, train, tune

    app.command(name="tune", short_help="Find the fastest recipe for a task and write it to a profile.")(tune.tune)
    app.command(name="train", short_help="Train a thin draft for a model.")(train.train)
    app.command(name="decode", short_help="Generate text with a profile; the tokens are the full model's own.")(decode.decode)
    app.command(name="chat", short_help="Talk to a model in the terminal.")(chat.chat)
    app.command(name="serve", short_help="Serve a model over OpenAI's API, with a page to watch it.")(serve.serve)
    app.command(name="bench", short_help="Compare speeds side by side: plain, with a profile, Hugging Face.")(bench.bench)
    app.command(name="export", short_help="Write a profile's draft as a checkpoint for other engines.")(export.export)
    app.command(name="report", short_help="Draw a search and its profile as one HTML file.")(report.report)
    app.command(name="list", short_help="List names that other commands take: models, tasks, searchers, …")(catalogue.catalogue)
    app.command(name="doctor", short_help="Check this installation or a model, and say what to run next.")(doctor.doctor)
    app.add_typer(profile.app, name="profile", short_help="Look at, check, compare, convert, fetch and verify profiles.")
    app.add_typer(task.app, name="task", short_help="Look at tasks and check them.")


def main() -> None:
    """Console entry point. Raises SystemExit with status 0, 1, 2 or 130."""
    err.quiet = False
    if not app.registered_commands:
        register()
    try:
        app(prog_name="skipsearch")   # also where it runs as a module
    except SkipSearchError as error:
        _fail(str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror or error}{where}")
    except KeyboardInterrupt:
        err.quiet = False
        err.print("interrupted")
        sys.exit(130)
    except Exception:  # a fault of this program: what its traceback quotes may be from outside, too
        err.quiet = False
        err.passage(traceback.format_exc().rstrip())
        sys.exit(1)


def _fail(sentence: str) -> None:
    err.quiet = False
    if os.environ.get("SKIPSEARCH_DEBUG"):
        err.passage(traceback.format_exc().rstrip())
        sys.exit(1)
    err.print("error: ", style="bold red", end="")
    err.print(sentence)
    sys.exit(1)


if __name__ == "__main__":
    main()
