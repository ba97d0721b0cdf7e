"""`skipsearch bench`: compare ways to decode, in one interleaved run."""

from __future__ import annotations

import typer

from skipsearch.cli.bench_batch import batch
from skipsearch.cli.bench_methods import methods
from skipsearch.cli.bench_run import run

app = typer.Typer(
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
