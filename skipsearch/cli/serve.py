"""`skipsearch serve`: a model behind OpenAI's protocol, drafting as a profile says."""

from __future__ import annotations

from typing import Annotated

import typer

from skipsearch.cli.opening import AutoFolder, AutoTask, ProfileChoice, decoder_of, open_both, say_verdict
from skipsearch.cli.options import Device, Dtype, Engine, Quantization, Threads, warn


def serve(model: Annotated[str | None, typer.Option(help="Which model; the profile's own if not given.")] = None,
          profile: ProfileChoice = "auto",
          host: Annotated[str, typer.Option(help="Where to listen; 127.0.0.1 is reached from this machine alone.")] = "127.0.0.1",
          port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
          name: Annotated[str | None, typer.Option(help="What clients call the model; its id if not given.")] = None,
          running: Annotated[int, typer.Option(min=1, max=64, help="Requests decoded side by side, a round of each in turn.")] = 4,
          waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")] = 64,
          seconds: Annotated[float, typer.Option(min=1, help="Of decoding one request at most.")] = 600,
          prefixes: Annotated[int, typer.Option(min=0, help="Texts whose K/V is kept for later requests of the same key.")] = 16,
          together: Annotated[bool, typer.Option("--together", help="Run the passes of running requests as one instead of in turn: more "
                                                                    "tokens a second of all, each request a little slower.")] = False,
          task: AutoTask = "any", profiles: AutoFolder = None,
          device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
          threads: Threads = None,
          exact: Annotated[bool, typer.Option("--exact", help="Greedy answers equal to the bit whatever was drafted or known before. Free "
                                                              "on the engine native; elsewhere every pass has eight "
                                                              "rows.")] = False) -> None:
    """Example: skipsearch serve --model demo --profile auto --task pycode

    Serve a model to OpenAI's clients: /v1/models, /v1/completions, /v1/chat/completions, streaming or not; /health, /metrics for
    Prometheus, and at / a page on which tokens are seen to arrive. As in OpenAI's protocol, a request that names no temperature is sampled
    at 1; ask for 0 to get greedy text. SKIPSEARCH_API_KEY, if it is set, holds the key that clients have to
    send, or several with commas between them. All requests share the time of the machine; those with the same key also share what their
    prompts begin with. Ctrl-C or SIGTERM takes no more requests and finishes those that it has.
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
