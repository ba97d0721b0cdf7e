"""`skipsearch serve`: serve a model over OpenAI's protocol, with a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skipsearch.cli.open_model import (
    ProfileChoice,
    ProfileSearch,
    load_model_and_profile,
    make_decoder,
    warn_about_verdict,
)
from skipsearch.cli.options import LoadOptions, unfold_options, warn
from skipsearch.cli.streams import decode_argument

if TYPE_CHECKING:
    from skipsearch.profile import Profile


@unfold_options
def serve(
    *,
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the profile's own.")
    ] = None,
    profile: ProfileChoice = "auto",
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 127.0.0.1 can be reached from this machine only."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="The model's name for clients. Default: its id, and --model as it is given.",
            parser=decode_argument,
            metavar="<str>",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="How many requests are decoded at the same time, a round of each in turn.",
        ),
    ] = 4,
    max_queue: Annotated[
        int,
        typer.Option(min=1, help="How many requests may wait; further ones are answered with 429."),
    ] = 64,
    request_timeout: Annotated[
        float, typer.Option(min=1, help="Time limit for decoding one request.")
    ] = 600,
    prefix_cache_size: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many texts are kept in the K/V cache for later requests with the same key.",
        ),
    ] = 16,
    prefix_memory: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="GB",
            help="Memory that the K/V of these texts may take; those unused for longest go first.",
        ),
    ] = 2.0,
    prefix_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Store the K/V of long texts in this folder when they leave the memory or the "
            "server ends, so that they survive a restart. Whoever reads the folder reads the "
            "prompts. Default: nothing is stored.",
        ),
    ] = None,
    prefix_disk: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="GB",
            help="Disk that the files of --prefix-cache may take; those unused for longest go "
            "first.",
        ),
    ] = 2.0,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens of a prompt and its answer. Default: the model's own "
            "limit, or 131072 for a model that names none. Each running request "
            "holds K/V for at most twice its tokens.",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let the pages of this site call the server from a browser, such as "
            "http://localhost:3000; * allows all pages. May be repeated. Default: none.",
        ),
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="Sampling of requests that name none: auto takes what the model's "
            "generation_config.json or GGUF file recommends; none takes OpenAI's defaults."
        ),
    ] = "auto",
    log_prompts: Annotated[
        Path | None,
        typer.Option(
            help="Append the prompt of each request, as the model reads it, to a .jsonl for "
            "`skipsearch tune --task`. Only you can read it. Default: prompts are not kept."
        ),
    ] = None,
    batch_passes: Annotated[
        bool,
        typer.Option(
            "--batch-passes",
            help="Run the passes of all running requests as one batch: more tokens a"
            " second in total, but each request is a little slower. The batch "
            "has K/V for 32768 tokens in all; a request that outgrows its part "
            "continues alone.",
        ),
    ] = False,
    search: ProfileSearch,
    loading: LoadOptions,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Greedy answers are equal to the last bit, whatever was drafted or "
            "cached. This is free on the engine native; on others every pass computes"
            " eight rows.",
        ),
    ] = False,
) -> None:
    """Example: skipsearch serve --model demo --profile auto --task pycode

    Serve a model over OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions, streaming
    or not. /health and /metrics (for Prometheus) say how it is doing, and / is a page that shows
    tokens as they arrive. A request without a temperature is sampled at the one that the model's
    author recommends, else at 1 as in OpenAI's API; ask for 0 to get greedy text.

    SKIPSEARCH_API_KEY may hold the key that clients must send, or several with commas between them.
    Requests with the same key share the cache of common prompt beginnings. Ctrl-C or SIGTERM
    finishes the running requests and takes no new ones."""
    from skipsearch.cli.consoles import err
    from skipsearch.core.files import make_private_dir
    from skipsearch.models.chat.chat_text import prepare_renderer
    from skipsearch.serve.auth import APIKeys
    from skipsearch.serve.cors import read_origins
    from skipsearch.serve.limits import Limits
    from skipsearch.serve.memory_bounds import describe_memory
    from skipsearch.serve.server import is_loopback, require_serve_extra
    from skipsearch.serve.server import run_server as run

    require_serve_extra()  # before the model is loaded
    if prefix_cache is not None:
        try:
            make_private_dir(prefix_cache)
        except OSError as error:
            raise typer.BadParameter(
                f"the folder {prefix_cache} cannot be made ({error.strerror}): name another with "
                "--prefix-cache"
            ) from None
    cors_origins = read_origins(cors or [])
    if "*" in cors_origins and not APIKeys.from_environment().required:
        warn(
            [
                "--cors is *: every page that a browser here opens may use this server; name the "
                "sites that need it, or set SKIPSEARCH_API_KEY to ask for a key"
            ]
        )
    if not APIKeys.from_environment().required and not is_loopback(host):
        warn(
            [
                f"everybody who reaches {host} may use this server: set SKIPSEARCH_API_KEY to ask "
                "for a key"
            ]
        )
    adapter, loaded = load_model_and_profile(profile, model, search, loading)
    prepare_renderer(adapter.tokenizer)
    decoder = make_decoder(adapter, loaded, exact)
    warn(decoder.warnings)
    sampling = adapter.spec.sampling_defaults if generation_config == "auto" else {}
    unnamed = {"temperature": 1, **sampling}  # of requests that do not name them
    warn_about_verdict(loaded, unnamed, "requests that name no temperature have")
    if batch_passes:
        _warn_of_unmeasured_batches(loaded)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_queue=max_queue,
        request_timeout_s=request_timeout,
        prefix_cache_size=prefix_cache_size,
        batch_passes=batch_passes,
        prefix_bytes=int(prefix_memory * 1e9),
        prefix_folder=prefix_cache,
        prefix_disk_bytes=int(prefix_disk * 1e9),
        context=context,
    )
    draft_bytes = 0 if loaded is None or loaded.measured is None else loaded.measured.draft_bytes
    err.print(describe_memory(adapter, limits, draft_bytes, decoder.loop.draft_models), style="dim")
    named = ", ".join(f"{name} {value}" for name, value in unnamed.items())
    origin = ", as the model's author recommends (--generation-config none turns that off)"
    err.print(f"requests that name no other have {named}{origin if sampling else ''}", style="dim")
    with err.even_if_quiet():  # with --quiet too: the user needs the address
        run(
            decoder,
            host,
            port,
            limits,
            served_model_name,
            None if served_model_name else model,
            lambda address: err.print(
                f"serving {served_model_name or adapter.spec.id} at {address}; Ctrl-C ends it"
            ),
            cors_origins,
            sampling,
            log_prompts,
            lambda sentence: warn([sentence]),
        )


def _warn_of_unmeasured_batches(profile: Profile | None) -> None:
    if profile is None or not profile.recipe.drafters:
        return
    if profile.measured is None or not profile.measured.by_batch:
        warn(
            [
                "this profile was not measured with several requests at once, where drafts may "
                "cost more than they save: `skipsearch bench batch --profile FILE --save` measures "
                "it, and large batches then decode plainly"
            ]
        )
