"""`skipsearch serve`: a model behind OpenAI's protocol, drafting as a profile says."""

from __future__ import annotations

from typing import Annotated

import typer

from skipsearch.cli.opening import AutoFolder, AutoTask, ProfileChoice, decoder_of, open_both, say_verdict
from skipsearch.cli.options import Device, Dtype, Engine, Quantization, Threads, warn


def serve(model: Annotated[str | None, typer.Option(help="The model. Default: the profile's own.")] = None,
          profile: ProfileChoice = "auto",
          host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 can be reached from this machine only.")] = "127.0.0.1",
          port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
          name: Annotated[str | None, typer.Option(help="The model's name for clients. Default: its id.")] = None,
          running: Annotated[int, typer.Option(min=1, max=64, help="How many requests are decoded at the same time, a round of each in "
                                                                   "turn.")] = 4,
          waiting: Annotated[int, typer.Option(min=1, help="How many requests may wait; further ones are answered with 429.")] = 64,
          seconds: Annotated[float, typer.Option(min=1, help="Time limit for decoding one request.")] = 600,
          prefixes: Annotated[int, typer.Option(min=0, help="How many texts are kept in the K/V cache for later requests with the same "
                                                            "key.")] = 16,
          together: Annotated[bool, typer.Option("--together", help="Run the passes of all running requests as one batch: more tokens a"
                                                                    " second in total, but each request is a little slower.")] = False,
          task: AutoTask = "any", profiles: AutoFolder = None,
          device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
          threads: Threads = None,
          exact: Annotated[bool, typer.Option("--exact", help="Greedy answers are equal to the last bit, whatever was drafted or "
                                                              "cached. This is free on the engine native; on others every pass computes"
                                                              " eight rows.")] = False) -> None:
    """Example: skipsearch serve --model demo --profile auto --task pycode

    Serve a model over OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions, streaming or not. /health and /metrics (for
    Prometheus) say how it is doing, and / is a page that shows tokens as they arrive. As in OpenAI's API, a request without a temperature
    is sampled at 1; ask for 0 to get greedy text.

    SKIPSEARCH_API_KEY may hold the key that clients must send, or several with commas between them. Requests with the same key share the
    cache of common prompt beginnings. Ctrl-C or SIGTERM finishes the running requests and takes no new ones.
    """
    from skipsearch.cli.common import err
    from skipsearch.serve.keys import Keys
    from skipsearch.serve.limits import Limits
    from skipsearch.serve.run import check_installed, is_loopback
    from skipsearch.serve.run import serve as run

    check_installed()   # before the model is loaded
    if not Keys.from_environment().asked_for and not is_loopback(host):
        warn([f"everybody who reaches {host} may use this server: set SKIPSEARCH_API_KEY to ask for a key"])
    adapter, loaded = open_both(profile, model, task, profiles, device, dtype, quantization, engine, threads)
    decoder = decoder_of(adapter, loaded, exact)
    warn(decoder.warnings)
    say_verdict(loaded)
    with err.heard():   # with --quiet too: who started it has to know where it is
        run(decoder, host, port, Limits(running=running, waiting=waiting, seconds=seconds, prefixes=prefixes, together=together), name,
            lambda address: err.print(f"serving {name or adapter.spec.id} at {address}; Ctrl-C ends it"))
