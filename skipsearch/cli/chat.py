"""`skipsearch chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.constraint_options import ConstraintOptions
from skipsearch.cli.open_model import (
    ProfileChoice,
    ProfileSearch,
    find_profile_for,
    load_model_and_profile,
    make_decoder,
    warn_about_verdict,
)
from skipsearch.cli.options import LoadOptions, SamplingOptions, unfold_options, warn
from skipsearch.cli.streams import decode_argument

if TYPE_CHECKING:
    from skipsearch.decoding.conversation import Conversation
    from skipsearch.decoding.request import RequestOptions

HELP = """/reset             forget the conversation
/save FILE         write the conversation to a new file, as one line of JSON
/stats             how the last answer was decoded, and what the profile claims
/profile WHICH     use a profile's file, `auto` or `none` from here on; \
the next answer reads the conversation again
/quit              leave, as Ctrl-D does; Ctrl-C stops an answer"""


@unfold_options
def chat(
    *,
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the profile's own.")
    ] = None,
    profile: ProfileChoice = "auto",
    system: Annotated[
        str | None,
        typer.Option(
            help="System prompt, for models with a chat template.",
            parser=decode_argument,
            metavar="<str>",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens of one answer.")
    ] = 512,
    sampling: SamplingOptions,
    shape: ConstraintOptions,
    search: ProfileSearch,
    loading: LoadOptions,
) -> None:
    """Example: skipsearch chat --model demo --profile auto --task pycode

    Talk to a model. A base model, which has no chat template, continues the text instead. The
    conversation stays in the model's cache, so each turn computes only what is new. Type /help for
    the commands."""
    from skipsearch.cli.consoles import err
    from skipsearch.decoding.conversation import Conversation
    from skipsearch.models.chat.chat_text import prepare_renderer

    options: RequestOptions = {**sampling.for_request(), "constraint": shape.read()}
    adapter, loaded = load_model_and_profile(profile, model, search, loading)
    prepare_renderer(adapter.tokenizer)
    talk = Conversation(adapter, loaded, system, max_new_tokens, options, make_decoder)
    warn(talk.decoder.warnings)
    warn_about_verdict(loaded, sampling.for_request())
    kind = "talk to it" if talk.is_chat else "it has no chat template, so it continues your text"
    err.print(f"{adapter.spec.id}: {kind}; /help lists the commands, /quit leaves", style="dim")
    for line in _read_lines():
        if line.startswith("/"):
            if not _run_command(talk, line, model, search):
                return
        elif line:
            _print_answer(talk, line)


def _read_lines() -> Iterator[str]:
    """Yield typed lines until the end of input. Ctrl-C drops the line."""
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


def _print_answer(conversation: Conversation, text: str) -> None:
    """Print an answer as it is generated; Ctrl-C ends it."""
    import sys

    from skipsearch.cli.consoles import err
    from skipsearch.cli.terminal import for_stream
    from skipsearch.errors import SkipSearchError

    with _interruptible() as stopped:
        try:
            answer = conversation.send(text)
            for part in answer:
                sys.stdout.write(for_stream(part, sys.stdout))
                sys.stdout.flush()
                if stopped:
                    answer.close()  # type: ignore[attr-defined]
                    break
            print(" [stopped]" if stopped else "", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", flush=True)
        except SkipSearchError as error:
            err.print(f"error: {error}", style="red")


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Run a block in which Ctrl-C appends to the yielded list instead of raising.

    The caller then ends the answer after the current round. A second Ctrl-C raises
    KeyboardInterrupt.
    """
    stopped: list[bool] = []

    def stop(*_: object) -> None:
        stopped.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _run_command(
    conversation: Conversation, line: str, model: str | None, search: ProfileSearch
) -> bool:
    """Run a command of the conversation. Returns False if the command ends the conversation."""
    from skipsearch.cli.consoles import err, out
    from skipsearch.errors import SkipSearchError
    from skipsearch.profile import load_profile

    command, _, rest = line.partition(" ")
    rest = rest.strip()
    try:
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                out.print_block(HELP)
            case "/reset":
                conversation.reset()
                out.print("what was said is forgotten")
            case "/stats":
                out.print_block("\n".join(conversation.describe_last()))
            case "/save" if rest:
                conversation.save(Path(rest).expanduser())
                out.print(f"written to {rest}")
            case "/profile" if rest:
                named = model or conversation.model.spec.id
                chosen = (
                    None
                    if rest == "none"
                    else find_profile_for(conversation.model, named, search)
                    if rest == "auto"
                    else load_profile(rest)
                )
                warn(conversation.use_profile(chosen))
                warn_about_verdict(chosen)
                out.print(conversation.describe_last()[0])
            case _:
                out.print(
                    f"{line!r} is no command, or lacks its argument; /help lists the commands"
                )
    except SkipSearchError as error:
        err.print(f"error: {error}", style="red")
    except OSError as error:
        err.print(f"error: {rest}: {error.strerror or error}", style="red")
    return True
