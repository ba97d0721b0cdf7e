"""`skipsearch decode`: generate with a profile, or plainly; the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.constraint_options import ConstraintOptions
from skipsearch.cli.open_model import (
    ProfileSearch,
    load_model_and_profile,
    make_decoder,
    require_model,
    warn_about_verdict,
)
from skipsearch.cli.options import (
    Json,
    LoadOptions,
    SamplingOptions,
    require_usage,
    unfold_options,
    warn,
)
from skipsearch.cli.streams import decode_argument
from skipsearch.core.sizes import format_tokens_per_s
from skipsearch.profile.paths import ANY

if TYPE_CHECKING:
    from skipsearch.decoding import Decoder, Generation
    from skipsearch.models import ModelAdapter
    from skipsearch.tasks.rows import Row
    from skipsearch.tasks.task import Prompt

    NamedRow = tuple[str, str | Row]

FINISH_NOTES = {
    "eos": "ended by the model",
    "stop": "up to a --stop text",
    "repeat": "up to where the text began to repeat itself",
    "loop": "up to where the text repeats the same tokens again and again",
    "length": "up to the limit",
    "time": "up to its time limit",
}  # by finish reason
MAX_LOOKUP_HISTORY = 10**7  # as many as a decoder remembers
# Settings that lines of prompts have for other programs, and the options that set them here.
LINE_FLAGS = {
    "max_new_tokens": "--max-new-tokens",
    "max_tokens": "--max-new-tokens",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "seed": "--seed",
    "stop": "--stop",
    "end_on_repeat": "--end-on-repeat",
}


@unfold_options
def decode(
    *,
    source: Annotated[
        str | None,
        typer.Argument(metavar="[-]", help="`-` reads .jsonl from standard input, line by line."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="A file, `auto` (the best profile found for this machine; the default of chat and "
            "serve) or `none` (plain decoding)."
        ),
    ] = "none",
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the profile's own.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="One prompt.", parser=decode_argument, metavar="<str>")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='A .jsonl of {"prompt": …} or {"messages": …} lines.')
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put each prompt into the model's chat template, as a user's turn. Default: as "
            "with the prompts that the profile was tuned on.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 128,
    sampling: SamplingOptions,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the text at this string. May be repeated.",
            parser=decode_argument,
            metavar="<str>",
        ),
    ] = None,
    end_on_repeat: Annotated[
        int | None, typer.Option(min=2, help="End when an n-gram of this length repeats.")
    ] = None,
    shape: ConstraintOptions,
    search: ProfileSearch,
    loading: LoadOptions,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Greedy tokens are equal to the last bit with any profile or none, in "
            "every dtype. This is free on the engine native; on others every pass "
            "computes eight rows.",
        ),
    ] = False,
    lookup_history: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_LOOKUP_HISTORY,
            help="Let lookup copy from this many tokens of earlier answers of this run. "
            "Helps when prompts resemble each other.",
        ),
    ] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Decode without drafting too, and compare the tokens. They are "
            "equal to the bit on the engine native and with --exact; else a near-tie "
            "may fall otherwise, which is frequent in 16 bits.",
        ),
    ] = False,
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side",
            help="Decode a prompt plainly and with the profile, and play both at once.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Example: skipsearch decode --profile my-profile.yaml --prompt "def main(argv=None):"

    Generate text with a profile. Its drafters propose tokens, the full model verifies them, and the
    result is the full model's own text. Control characters in the text are escaped on a terminal,
    such as \\x1b; a pipe gets the text as it is."""
    given = [x is not None for x in (source, prompt, prompts)]
    require_usage(
        sum(given) == 1,
        "give exactly one of --prompt TEXT, --prompts FILE.jsonl or - (standard input)",
    )
    require_usage(
        source in (None, "-"),
        f"{source!r} is not understood here: use --prompt TEXT, or - for standard input",
    )
    require_usage(
        not check or sampling.temperature == 0,
        "--check compares greedy tokens; at a temperature above 0 two runs draw different ones",
    )
    require_usage(
        not side_by_side or (prompt is not None and not as_json and sampling.temperature == 0),
        "--side-by-side plays one greedy text: give --prompt TEXT, and leave --json and "
        "--temperature out",
    )
    require_usage(
        search.task == ANY or profile == "auto",
        "--task says which profile to look for: give it with --profile auto",
    )
    require_model(profile, model)
    from skipsearch.cli.consoles import err, out
    from skipsearch.cli.side_by_side import record_in_turns, show_side_by_side
    from skipsearch.decoding import Decoder
    from skipsearch.errors import ModelError
    from skipsearch.models.chat.chat_text import get_chat_template
    from skipsearch.profile.show import format_speedup

    options = {
        **sampling.for_request(),
        "max_new_tokens": max_new_tokens,
        "stop": stop,
        "end_on_repeat": end_on_repeat,
        "constraint": shape.read(),
    }
    requests = _read_requests(prompt, prompts)
    adapter, loaded = load_model_and_profile(profile, model, search, loading)
    has_template = get_chat_template(adapter.tokenizer) is not None
    if chat and not has_template:
        raise ModelError(
            f"{adapter.spec.id} has no chat template: leave --chat out, and write the prompt as "
            "the model expects it"
        )
    if chat is None:
        chat = has_template and loaded is not None and loaded.task.is_chat
    decoder = make_decoder(adapter, loaded, exact, lookup_history)
    is_compared = check or side_by_side
    plain = Decoder(adapter, exact=exact, draft_forced=False) if is_compared else None
    warn(decoder.warnings)
    warn_about_verdict(loaded, sampling.for_request())
    if plain is not None:  # warm up both, so that neither is timed with start-up costs
        for either in (decoder, plain):
            either.generate([0, 0], 16, ignore_eos=True)
    if side_by_side and plain is not None and prompt is not None:
        kinds = [spec.kind for spec in decoder.recipe.drafters]
        ids = _encode(adapter, "prompt", _read_prompt(prompt, chat), chat, max_new_tokens)
        plain_run, drafted_run = record_in_turns([plain, decoder], ids, options)
        show_side_by_side(out, plain_run, drafted_run, kinds)
        return
    differing = 0
    for name, line in requests:
        differing += _decode_one(
            adapter,
            decoder,
            plain,
            name,
            _read_prompt(line, chat),
            chat,
            options,
            as_json,
            titled=prompt is None,
        )
    if (
        check
        and not as_json
        and loaded is not None
        and loaded.measured is not None
        and decoder.recipe.drafters
    ):
        few = "one prompt says" if prompt is not None else "a few prompts say"
        err.print(
            f"{few} little about speed: on {loaded.measured.prompts} hold-out prompts the profile "
            f"measured {format_speedup(loaded)}",
            style="dim",
        )
    if differing:
        raise typer.Exit(1)


def _read_requests(prompt: str | None, prompts: Path | None) -> Iterable[NamedRow]:
    """Return (id, text or line) of every request.

    A file is read as a whole, so that an invalid line is reported before the model is loaded.
    Standard input is read line by line.

    Raises: TaskError.
    """
    import sys

    from skipsearch.tasks.sources.jsonl import iter_rows, read_rows

    def parse(rows: Iterable[Row]) -> Iterator[NamedRow]:
        is_warned = False
        for row in rows:
            _read_prompt(row, chat=False)  # reports an invalid line
            if not is_warned and (ignored := sorted(LINE_FLAGS.keys() & row.columns.keys())):
                is_warned = True
                warn(
                    [
                        f"{row.location} sets {ignored[0]}, and a line sets its prompt alone: give "
                        f"{LINE_FLAGS[ignored[0]]}, which counts for every line"
                    ]
                )
            yield row.id, row

    if prompt is not None:
        return [("prompt", prompt)]
    return (
        parse(iter_rows(sys.stdin.buffer, "standard input"))
        if prompts is None
        else list(parse(read_rows(prompts)))
    )


def _read_prompt(line: str | Row, chat: bool) -> Prompt:
    """Return the prompt of a request. A conversation goes through the template without --chat."""
    from skipsearch.tasks.conversations import name_conversation
    from skipsearch.tasks.prompt_rows import prompt_from_row
    from skipsearch.tasks.task import Prompt

    if isinstance(line, str):
        return Prompt("prompt", line)
    prompt = prompt_from_row(line, chat)
    if name_conversation(line) is None or prompt.turns:
        return prompt
    return replace(prompt, turns=[{"role": "user", "content": prompt.text}])


def _encode(
    model: ModelAdapter, name: str, prompt: Prompt, chat: bool, max_new_tokens: int
) -> list[int]:
    """Return the token ids of a request, and warn if the answer may not fit into the context.

    Raises: ModelError for a model without a tokenizer.
    """
    from skipsearch.errors import ModelError
    from skipsearch.replay.workload import encode_request

    if model.tokenizer is None:
        raise ModelError(
            f"{model.spec.id} has no tokenizer, so it takes token ids only: use Decoder.generate "
            "from Python"
        )
    ids = encode_request(model.tokenizer, prompt, chat or bool(prompt.turns))
    capacity = None if model.spec.context_length is None else model.spec.context_length - len(ids)
    if capacity is not None and 0 < capacity < max_new_tokens:
        warn(
            [
                f"{name}: {max_new_tokens} tokens were asked for, and after this prompt "
                f"{model.spec.id} has room for {capacity}"
            ]
        )
    return ids


def _decode_one(
    model: ModelAdapter,
    decoder: Decoder,
    plain_decoder: Decoder | None,
    name: str,
    prompt: Prompt,
    chat: bool,
    options: dict,
    as_json: bool,
    titled: bool,
) -> int:
    """Decode one request and print it. Returns 1 if --check found different tokens, else 0.

    titled: print the request's name above its text, because there are several requests.
    """
    from skipsearch.cli.consoles import print_json
    from skipsearch.decoding import FORCED_KIND
    from skipsearch.engine import is_batch_invariant
    from skipsearch.timing.interleaved import find_first_divergence

    ids = _encode(model, name, prompt, chat, options["max_new_tokens"])
    result = (
        decoder.generate(ids, **options)
        if as_json
        else _stream_text(decoder, ids, options, f"== {name} ==" if titled else None)
    )
    checked = None
    if plain_decoder is not None:
        reference = plain_decoder.generate(ids, **options)
        divergence = find_first_divergence(model, ids, reference.tokens, result.tokens)
        checked = {
            "identical": divergence is None,
            "first_difference": divergence.index if divergence else None,
            "logit_gap": divergence.gap if divergence else None,
            "plain_seconds_per_token": reference.stats.seconds_per_token,
        }
    if as_json:
        row = {
            "id": name,
            "prompt_tokens": len(ids),
            "tokens": result.tokens,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "stats": result.stats.as_dict(),
        }
        print_json(row | ({"check": checked} if checked else {}))
    else:
        rounds_alike = decoder.loop.exact or is_batch_invariant(model)
        kinds = [spec.kind for spec in decoder.recipe.drafters]
        if options["constraint"] is not None:
            kinds.append(FORCED_KIND)
        _print_summary(name, result, checked, kinds, rounds_alike)
    return int(checked is not None and not checked["identical"])


def _stream_text(
    decoder: Decoder, ids: list[int], options: dict, title: str | None = None
) -> Generation:
    """Print text to stdout as it is generated.

    A pipe or a file gets the text unchanged. A terminal would obey control characters, so they are
    escaped.
    """
    import sys

    from skipsearch.cli.terminal import escape_controls, for_stream
    from skipsearch.decoding import Generation

    tokens, text = [], ""
    if title is not None:
        print(escape_controls(title), flush=True)
    for chunk in decoder.stream(ids, **options):
        tokens += chunk.tokens
        text += chunk.text or ""
        sys.stdout.write(for_stream(chunk.text or "", sys.stdout))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert chunk.finish_reason is not None
    assert chunk.stats is not None
    return Generation(tokens, chunk.finish_reason, chunk.stats, text)


def _print_summary(
    name: str, result: Generation, checked: dict | None, kinds: list[str], rounds_alike: bool
) -> None:
    """Print on stderr how a request was decoded, and the result of --check."""
    from skipsearch.cli.consoles import err

    stats, pace = result.stats, result.stats.seconds_per_token
    plural = "" if stats.tokens == 1 else "s"
    line = f"{name}: {stats.tokens} new token{plural}, {FINISH_NOTES[result.finish_reason]}"
    line += "" if kinds else ", decoded plainly"
    if pace:
        line += f", {format_tokens_per_s(1 / pace)} tokens/s"
        line += f" after a prefill of {stats.prefill_seconds:.2f} s"
        line += f", τ {stats.tau:.2f}" if kinds else ""
    if stats.alpha is not None:
        line += f", α {stats.alpha:.2f}"
    if len(stats.by_drafter) > 1:
        parts = (
            f"{kind} {d.accepted} of {d.drafted}"
            for kind, d in zip(kinds, stats.by_drafter, strict=True)
        )
        line += f", accepted of drafted: {', '.join(parts)}"
    err.print(line, style="dim")
    if checked and checked["identical"] and not kinds:
        err.print(
            "nothing was drafted, so there was nothing to check: both runs decoded plainly, to the "
            "same tokens",
            style="green",
        )
    elif checked and checked["identical"]:
        plain = checked["plain_seconds_per_token"]
        pace_of_plain = (
            f", which made {format_tokens_per_s(1 / plain)} tokens/s" if plain else ""
        )  # no ratio: one run of one prompt is mostly noise
        err.print(f"tokens identical to plain decoding{pace_of_plain}", style="green")
    elif checked:
        err.print(
            f"tokens differ from plain decoding at {checked['first_difference']}, where the two "
            "likeliest tokens are "
            f"{checked['logit_gap']:.2g} apart in logits"
            + (
                ""
                if rounds_alike
                else "; a pass over several rows rounds otherwise than one over a single row, and "
                "--exact does "
                "without that"
            ),
            style="red",
        )
