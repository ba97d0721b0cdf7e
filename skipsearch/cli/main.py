"""`skipsearch`: the entry point. It turns every expected failure into one sentence and an exit
status.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from typing import Any

import typer
from typer.core import TyperGroup

from skipsearch import __version__
from skipsearch.cli.consoles import err
from skipsearch.cli.streams import prepare_streams
from skipsearch.cli.terminal import escape_controls
from skipsearch.errors import SkipSearchError


@contextmanager
def _explain_usage_errors() -> Iterator[None]:
    """Escape what a usage error quotes."""
    try:
        yield
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if context is None or error.message != context.get_help():  # a group alone shows its help
            error.message = escape_controls(error.message)
        raise


class RootGroup(TyperGroup):
    """The command that all others belong to.

    A usage error quotes arguments, which a shell may have made from the name of any file. Quoted
    arguments are therefore escaped.
    """

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _explain_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _explain_usage_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="skipsearch",
    cls=RootGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # Wide, because an example that is broken into two lines cannot be copied.
    context_settings={"max_content_width": 140},
    help="Example: skipsearch tune --model demo --task pycode\n\n"
    "Find the fastest lossless way to decode with a language model, and decode with it. Drafts "
    "come from prompt lookup, from the "
    "model with some of its sub-layers skipped, or from both.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"skipsearch {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
    quiet: bool = typer.Option(
        False,
        "--quiet",
        "-q",
        help="Hide progress and remarks on stderr; warnings and errors stay.",
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback if something fails."),
) -> None:
    err.quiet = quiet
    if debug:
        os.environ["SKIPSEARCH_DEBUG"] = "1"


def register() -> None:
    """Register every command. Each command is in a file of its own."""
    from skipsearch.cli import (
        bench_command,
        chat,
        decode,
        doctor,
        export,
        list_command,
        profile,
        report,
        serve,
        task,
        train,
        tune,
    )

    app.command(
        name="tune", short_help="Find the fastest recipe for a task and write it to a profile."
    )(tune.tune)
    app.command(
        name="decode",
        short_help="Generate text with a profile; the tokens are the full model's own.",
    )(decode.decode)
    app.command(name="chat", short_help="Talk to a model in the terminal.")(chat.chat)
    app.command(
        name="serve", short_help="Serve a model over OpenAI's API, with a page to watch it."
    )(serve.serve)
    app.command(
        name="export", short_help="Write a profile's draft as a checkpoint for other engines."
    )(export.export)
    app.command(name="report", short_help="Draw a search and its profile as one HTML file.")(
        report.report
    )
    app.command(
        name="list", short_help="List names that other commands take: models, tasks, searchers, …"
    )(list_command.catalogue)
    app.command(
        name="doctor", short_help="Check this installation or a model, and say what to run next."
    )(doctor.doctor)
    app.add_typer(train.app, name="train", short_help="Train a thin draft for a model.")
    app.add_typer(
        bench_command.app,
        name="bench",
        short_help="Compare speeds side by side: plain, with a profile, Hugging Face.",
    )
    app.add_typer(
        profile.app,
        name="profile",
        short_help="Look at, check, compare, convert, fetch and verify profiles.",
    )
    app.add_typer(task.app, name="task", short_help="Look at tasks and check them.")


def let_idle_threads_sleep() -> None:
    """Let torch's idle threads sleep, unless the environment says that they spin.

    By default, idle threads spin and take the cores from the threads of engine `native` between its
    passes. On two threads, drafting was three times as slow. OpenMP reads the variables once, when
    torch is imported. Only a command sets them, for its own process: a library must not set them
    for the program that imports it.
    Threads still spin for some microseconds before they sleep, also if the environment had the
    policy already. In `bench`, llama.cpp shares torch's OpenMP, and waits for its threads many
    times a token. Without this spin, a token of a 1.5 B model took it 58 ms instead of 40.
    """
    if "torch" in sys.modules:
        return
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> None:
    """Run the command line. Raises SystemExit with status 0, 1, 2 or 130."""
    prepare_streams()
    let_idle_threads_sleep()
    err.quiet = False
    if not app.registered_commands:
        register()
    try:
        app(prog_name="skipsearch")  # also if it runs as a module
    except SkipSearchError as error:
        _print_failure(str(error))
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        way_out = ": make room, or send the result elsewhere" if error.errno == ENOSPC else ""
        _print_failure(f"{error.strerror or error}{file}{way_out}")
    except KeyboardInterrupt:
        err.quiet = False
        err.print("interrupted")
        sys.exit(130)
    except Exception:  # a bug; the traceback may quote text from outside, so it is escaped
        err.quiet = False
        err.print_block(traceback.format_exc().rstrip())
        sys.exit(1)


def _print_failure(sentence: str) -> None:
    err.quiet = False
    if os.environ.get("SKIPSEARCH_DEBUG"):
        err.print_block(traceback.format_exc().rstrip())
        sys.exit(1)
    err.print("error: ", style="bold red", end="")
    err.print(sentence)
    sys.exit(1)


if __name__ == "__main__":
    main()
