"""`skipsearch bench`: compare ways to decode, in one interleaved run."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from skipsearch.cli.bench_batch import batch
from skipsearch.cli.bench_methods import methods
from skipsearch.cli.bench_run import run

NEW_COMMANDS = {"--methods": "methods", "--batch": "batch --sizes"}  # by flag of the old `bench`


class BenchGroup(TyperGroup):
    """A group that fails if an option other than --help directly follows `bench`.

    The error names the command to use instead. `bench` was one command before, with the flags
    --methods and --batch.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_old = bool(args) and args[0].startswith("-") and args[0] != "--help"
        if is_old and not ctx.resilient_parsing:  # a shell completes commands with it
            flags = {argument.partition("=")[0] for argument in args}
            command = next((new for old, new in NEW_COMMANDS.items() if old in flags), "run")
            ctx.fail(f"bench is a group of commands now: use `skipsearch bench {command} …`")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=BenchGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Example: skipsearch bench run --profile my-profile.yaml\n\n"
    "Compare ways to decode side by side. All decode the same hold-out prompts and take turns in "
    "one run.",
)
app.command("run", short_help="Systems, one request at a time: plain, a profile, Hugging Face.")(
    run
)
app.command("batch", short_help="Drafting and plain decoding, by number of requests in a batch.")(
    batch
)
app.command("methods", short_help="Every drafting method, each at its best settings.")(methods)
