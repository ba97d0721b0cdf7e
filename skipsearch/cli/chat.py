"""`skipsearch chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.opening import AutoFolder, AutoTask, ProfileChoice, decoder_of, look_up, open_both, say_verdict
from skipsearch.cli.options import Device, Dtype, Engine, Quantization, Seed, Temperature, Threads, TopK, TopP, warn

if TYPE_CHECKING:
    from skipsearch.conversation import Conversation
    from skipsearch.decoding.request import Settings

HELP = """/reset             forget the conversation
/save FILE         write the conversation to a new file, as one line of JSON
/stats             how the last answer was decoded, and what the profile claims
/profile WHICH     use a profile's file, `auto` or `none` from here on; the next answer reads the conversation again
/quit              leave, as Ctrl-D does; Ctrl-C stops an answer"""


def chat(model: Annotated[str | None, typer.Option(help="The model. Default: the profile's own.")] = None,
         profile: ProfileChoice = "auto",
         system: Annotated[str | None, typer.Option(help="System prompt, for models with a chat template.")] = None,
         max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of one answer.")] = 512,
         temperature: Temperature = 0.0, top_p: TopP = 1.0,
         top_k: TopK = 0, seed: Seed = 0, task: AutoTask = "any", profiles: AutoFolder = None,
         device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
         threads: Threads = None) -> None:
    """Example: skipsearch chat --model demo --profile auto --task pycode

    Talk to a model. A base model, which has no chat template, continues the text instead. The conversation stays in the model's cache, so
    each turn computes only what is new. Type /help for the commands.
    """
    from skipsearch.cli.common import err
    from skipsearch.conversation import Conversation
    from skipsearch.decoding.sampling import Sampling

    Sampling(temperature, top_p, top_k)   # a senseless one is told before the model is loaded
    adapter, loaded = open_both(profile, model, task, profiles, device, dtype, quantization, engine, threads)
    asked: Settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    talk = Conversation(adapter, loaded, system, max_new_tokens, asked, decoder_of)
    warn(talk.decoder.warnings)
    say_verdict(loaded)
    kind = "talk to it" if talk.is_chat else "it has no chat template, so it goes on from your text"
    err.print(f"{adapter.spec.id}: {kind}; /help lists the commands, /quit leaves", style="dim")
    for line in _lines():
        if line.startswith("/"):
            if not _obeyed(talk, line, model, task, profiles):
                return
        elif line:
            _answer(talk, line)


def _lines() -> Iterator[str]:
    """What is typed, until the end of input. Ctrl-C drops the line."""
    import sys
    from contextlib import suppress

    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    prompt = "you> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/quit leaves)")


def _answer(talk: Conversation, text: str) -> None:
    import sys

    from skipsearch.cli.common import err
    from skipsearch.cli.outside import for_stream
    from skipsearch.errors import SkipSearchError

    with _interruptible() as stopped:
        try:
            pieces = talk.ask(text)
            for piece in pieces:
                sys.stdout.write(for_stream(piece, sys.stdout))
                sys.stdout.flush()
                if stopped:
                    pieces.close()  # type: ignore[attr-defined]
                    break
            print(" [stopped]" if stopped else "", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", flush=True)
        except SkipSearchError as error:
            err.print(f"error: {error}", style="red")


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Ctrl-C fills the list, which ends the answer behind the round that runs; a second one ends it at once."""
    stopped: list[bool] = []

    def stop(*_: object) -> None:
        stopped.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _obeyed(talk: Conversation, line: str, model: str | None, task: str, folder: Path | None) -> bool:
    """Carry a command out; False: leave."""
    from skipsearch.cli.common import err, out
    from skipsearch.errors import SkipSearchError
    from skipsearch.profile import load_profile

    command, _, rest = line.partition(" ")
    rest = rest.strip()
    try:
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                out.passage(HELP)
            case "/reset":
                talk.reset()
                out.print("what was said is forgotten")
            case "/stats":
                out.passage("\n".join(talk.figures()))
            case "/save" if rest:
                talk.save(Path(rest).expanduser())
                out.print(f"written to {rest}")
            case "/profile" if rest:
                named = model or talk.model.spec.id
                chosen = None if rest == "none" else look_up(talk.model, named, task, folder) if rest == "auto" else load_profile(rest)
                warn(talk.choose(chosen))
                say_verdict(chosen)
                out.print(talk.figures()[0])
            case _:
                out.print(f"{line!r} is no command, or lacks its argument; /help lists the commands")
    except SkipSearchError as error:
        err.print(f"error: {error}", style="red")
    except OSError as error:
        err.print(f"error: {rest}: {error.strerror or error}", style="red")
    return True
