"""`skipsearch train`: train the weights of a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import require_usage, unfold_options
from skipsearch.cli.train_run import (
    HeadOptions,
    HeadTextOptions,
    RunOptions,
    TextOptions,
    run_training,
)

if TYPE_CHECKING:
    from skipsearch.core.mask import SkipMask
    from skipsearch.models import ModelAdapter
    from skipsearch.training.corpus import Corpus
    from skipsearch.training.driver import TrainingPlan, TrainListener

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Example: skipsearch train adapted --model demo --task pycode --out modules/\n\n"
    "Train a thin draft that is right more often. Only drafts use what is trained; the tokens stay "
    "the model's own. `tune --modules` then compares it with all other drafts.\n\n"
    "You can interrupt a training: the same command continues it.",
)

Model = Annotated[
    str,
    typer.Option(
        help="demo, an alias, a Hub id (org/name[@revision], org/name:Q4_K_M), a folder or a GGUF "
        "file."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        help="Folder for the trained module, and for the state of an interrupted training."
    ),
]
InitFrom = Annotated[
    Path | None, typer.Option(help="A module to continue from, on other text or for longer.")
]
DraftTokens = Annotated[
    int, typer.Option(min=1, max=16, help="How many tokens ahead drafts are trained.")
]


@app.command(short_help="Some of the model's own sub-layers.")
@unfold_options
def adapted(
    *,
    model: Model,
    out: Out,
    text: TextOptions,
    profile: Annotated[
        Path | None,
        typer.Option(help="A profile whose mask is trained. Default: search for a thin mask."),
    ] = None,
    draft_sublayers: Annotated[
        int | None,
        typer.Option(min=1, help="Size of the draft in sub-layers. Default: one in eight."),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="A module to continue from. With a smaller --draft-sublayers, the sub-layers that "
            "matter least are dropped."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Train low-rank changes of this rank instead of whole copies."),
    ] = None,
    draft_tokens: DraftTokens = 5,
    options: RunOptions,
) -> None:
    """Example: skipsearch train adapted --model demo --task pycode --out modules/

    Train copies of some of the model's own sub-layers, which draft without the others."""
    require_usage(
        not (profile and draft_sublayers),
        "--profile brings a mask and --draft-sublayers looks for one: give one of them",
    )
    require_usage(not (profile and init_from), "--init-from brings its mask: leave --profile out")
    mask = _mask_from_profile(profile)

    def plan(adapter: ModelAdapter, corpus: Corpus, on_event: TrainListener) -> TrainingPlan:
        from skipsearch.training.driver import plan_adapted

        return plan_adapted(
            adapter,
            corpus,
            mask,
            draft_sublayers,
            rank,
            draft_tokens,
            options.seed,
            on_event,
            init_from,
        )

    run_training(plan, "adapted", model, out, text, options, init_from)


@app.command(short_help="An adapter after the model's first layers.")
@unfold_options
def kangaroo(
    *,
    model: Model,
    out: Out,
    text: TextOptions,
    exit_layer: Annotated[
        int | None,
        typer.Option(min=1, help="How many layers run before the adapter. Default: one in eight."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="attention (an attention sub-layer and a norm) or layer (also an MLP). Default: "
            "attention."
        ),
    ] = None,
    init_from: InitFrom = None,
    options: RunOptions,
) -> None:
    """Example: skipsearch train kangaroo --model demo --task pycode --out modules/

    Train an adapter after the model's first layers, so that both draft together."""
    require_usage(form in (None, "attention", "layer"), f"--form {form!r} is attention or layer")

    def plan(adapter: ModelAdapter, corpus: Corpus, on_event: TrainListener) -> TrainingPlan:
        from skipsearch.training.driver import plan_kangaroo

        return plan_kangaroo(adapter, exit_layer, form, init_from)

    run_training(plan, "kangaroo", model, out, text, options, init_from)


@app.command(short_help="Embeddings that let one pass draft several tokens.")
@unfold_options
def s3d(
    *,
    model: Model,
    out: Out,
    text: TextOptions,
    draft_sublayers: Annotated[
        int | None, typer.Option(min=1, help="Size of the draft in layers. Default: one in three.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train low-rank changes of this rank in addition to the embeddings."
        ),
    ] = None,
    init_from: InitFrom = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="How many tokens ahead drafts are trained. Default: 4."),
    ] = None,
    options: RunOptions,
) -> None:
    """Example: skipsearch train s3d --model demo --task pycode --out modules/

    Train embeddings that let one pass of some of the model's layers draft several tokens."""

    def plan(adapter: ModelAdapter, corpus: Corpus, on_event: TrainListener) -> TrainingPlan:
        from skipsearch.training.driver import plan_s3d

        return plan_s3d(adapter, draft_sublayers, draft_tokens, rank, options.seed, init_from)

    run_training(plan, "s3d", model, out, text, options, init_from)


@app.command(short_help="A head that reads the model's last hidden state.")
@unfold_options
def mtp(
    *,
    model: Model,
    out: Out,
    text: HeadTextOptions,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many tokens the head is trained to draft. 0: all of them. Default: 8000.",
        ),
    ] = None,
    init_from: InitFrom = None,
    draft_tokens: DraftTokens = 3,
    options: HeadOptions,
) -> None:
    """Example: skipsearch train mtp --model model.gguf --budget 1h --out modules/

    Train a head of one layer, which drafts from the model's last hidden state. The model answers
    requests, by its own weights in its own format, and the head learns from its answers."""

    def plan(adapter: ModelAdapter, corpus: Corpus, on_event: TrainListener) -> TrainingPlan:
        from skipsearch.training.driver import plan_mtp

        return plan_mtp(adapter, corpus, vocabulary, draft_tokens, on_event, init_from)

    run_training(plan, "mtp", model, out, text, options, init_from, draft_tokens, options.bits)


def _mask_from_profile(profile: Path | None) -> SkipMask | None:
    """Return the mask of a profile to train. Raises: ModuleError if it skips nothing."""
    from skipsearch.errors import ModuleError
    from skipsearch.profile import load_profile

    if profile is None:
        return None
    mask = load_profile(profile).mask
    if not mask.n_skipped:
        raise ModuleError(
            f"{profile}: this profile skips nothing, so there is no mask to train: leave --profile "
            "out"
        )
    return mask
