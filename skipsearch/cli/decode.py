"""`skipsearch decode`: generate with a profile, or plainly; the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skipsearch.cli.options import Device, Dtype, Engine, Json, Quantization, Seed, Threads, load, model_of, require, settle, warn

if TYPE_CHECKING:
    from skipsearch.decoding import Decoder, Generation
    from skipsearch.models import ModelAdapter
    from skipsearch.profile import Profile


def decode(source: Annotated[str | None, typer.Argument(metavar="[-]", help="`-` reads .jsonl from standard input.")] = None,
           profile: Annotated[str, typer.Option(help="A file, `auto` (the best one found for this machine) or `none`.")] = "none",
           model: Annotated[str | None, typer.Option(help="Which model; the profile's own if not given.")] = None,
           prompt: Annotated[str | None, typer.Option(help="One prompt.")] = None,
           prompts: Annotated[Path | None, typer.Option(help="A .jsonl of {\"prompt\": …} lines.")] = None,
           chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template, as a user's turn.")] = False,
           max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
           temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0, top_p: Annotated[float, typer.Option()] = 1.0,
           top_k: Annotated[int, typer.Option()] = 0, seed: Seed = 0,
           stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given again.")] = None,
           end_on_repeat: Annotated[int | None, typer.Option(min=2, help="End at the first repeated n-gram of this length.")] = None,
           task: Annotated[str, typer.Option(help="Which task `--profile auto` looks for.")] = "any",
           profiles: Annotated[Path | None, typer.Option(help="A folder that `--profile auto` searches first.")] = None,
           device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
           threads: Threads = None,
           exact: Annotated[bool, typer.Option("--exact", help="Greedy tokens equal to the bit with any profile and none, in every "
                                                               "dtype; costs passes of eight rows.")] = False,
           check: Annotated[bool, typer.Option("--check", help="Decode plainly too and compare the tokens.")] = False,
           as_json: Json = False) -> None:
    """Example: skipsearch decode --profile my-profile.yaml --prompt "def main(argv=None):"

    Generate with a profile: its drafters propose tokens, the full model verifies them, and the tokens are the full model's own. A
    terminal is shown control characters of the text as escapes such as \\x1b; a pipe gets the text as it is.
    """
    given = [x is not None for x in (source, prompt, prompts)]
    require(sum(given) == 1, "give exactly one of --prompt TEXT, --prompts FILE.jsonl or - (standard input)")
    require(source in (None, "-"), f"{source!r} is not understood here: use --prompt TEXT, or - for standard input")
    require(not check or temperature == 0, "--check compares greedy tokens; at a temperature above 0 two runs draw different ones")
    require(not (profile in ("auto", "none") and model is None), f"--profile {profile} needs --model")
    from skipsearch.errors import ModelError
    from skipsearch.models.text import chat_template
    from skipsearch.profile import load_profile

    loaded = load_profile(profile) if profile not in ("auto", "none") else None
    named = model or (model_of(loaded) if loaded else "")
    adapter = load(named, device, dtype, engine, threads, quantization, loaded.engine if loaded else None)
    if profile == "auto":
        loaded = _look_up(adapter, task, profiles)
    adapter = settle(adapter, engine, loaded.engine if loaded else None)
    if chat and chat_template(adapter.tokenizer) is None:
        raise ModelError(f"{adapter.spec.id} has no chat template: leave --chat out, and write the prompt as the model expects it")
    if loaded is not None and loaded.task.chat_template_sha256 and not chat:
        warn(["this profile was made for requests in the chat template: with --chat yours go through it too"])
    from skipsearch.decoding import Decoder
    from skipsearch.evaluation.prices import prices_here

    prices = None if loaded is None else prices_here(loaded, adapter)
    decoder, plain = Decoder(adapter, loaded, exact=exact, prices=prices), Decoder(adapter, exact=exact) if check else None
    warn(decoder.warnings)
    if loaded is not None and loaded.verdict == "plain":
        warn(["this profile says that nothing beat plain decoding where it was made, so decoding is plain"])
    if loaded is not None and loaded.verdict == "unmeasured":
        warn(["this profile was imported and never measured here: it may be slower than plain decoding"])
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
               "stop": stop, "end_on_repeat": end_on_repeat}
    if plain is not None:  # first passes pay for start-up, which neither side should be charged
        for either in (decoder, plain):
            either.generate([0, 0], 16, ignore_eos=True)
    differing = 0
    for name, text in _requests(prompt, prompts):
        differing += _one(adapter, decoder, plain, name, text, chat, options, as_json)
    if differing:
        raise typer.Exit(1)


def _look_up(model: ModelAdapter, task: str, folder: Path | None) -> Profile | None:
    from skipsearch.cli.common import err
    from skipsearch.decoding.matching import machine_facts, model_facts
    from skipsearch.profile.lookup import find_profile

    found = find_profile(model_facts(model.spec), machine_facts(model.spec), task, folder)
    for rung in found.rungs:
        err.print(f"  {rung}", style="dim")
    if found.profile is None:
        others = f" (there are some for {', '.join(found.tasks)})" if found.tasks else ""
        warn([f"no profile for {model.spec.id} and task {task} was found{others}, so decoding is plain; `skipsearch tune --model "
              f"{model.spec.id} --task …` makes one"])
    return found.profile


def _requests(prompt: str | None, prompts: Path | None) -> Iterator[tuple[str, str]]:
    """(id, text) of every request."""
    import sys

    from skipsearch.tasks import read_prompts
    from skipsearch.tasks.prompts import bare_prompt
    from skipsearch.tasks.sources.jsonl import parse_rows

    if prompt is not None:
        yield "prompt", prompt
    elif prompts is not None:
        yield from ((p.id, p.text) for p in read_prompts(prompts))
    else:
        yield from ((p.id, p.text) for p in map(bare_prompt, parse_rows(sys.stdin.buffer, "standard input")))


def _one(model: ModelAdapter, decoder: Decoder, plain: Decoder | None, name: str, text: str, chat: bool, options: dict,
         as_json: bool) -> int:
    """Decode one request; returns 1 if --check found other tokens."""
    from skipsearch.cli.common import print_json
    from skipsearch.errors import ModelError
    from skipsearch.evaluation.wall import first_divergence
    from skipsearch.models.text import token_ids

    if model.tokenizer is None:
        raise ModelError(f"{model.spec.id} has no tokenizer, so it takes token ids only: use Decoder.generate from Python")
    ids = token_ids(model.tokenizer, text, chat=chat)
    result = decoder.generate(ids, **options) if as_json else _streamed(decoder, ids, options)
    checked = None
    if plain is not None:
        reference = plain.generate(ids, **options)
        where = first_divergence(model, ids, reference.tokens, result.tokens)
        checked = {"identical": where is None, "first_difference": where.index if where else None,
                   "logit_gap": where.gap if where else None, "plain_seconds_per_token": reference.stats.seconds_per_token}
    if as_json:
        row = {"id": name, "prompt_tokens": len(ids), "tokens": result.tokens, "text": result.text,
               "finish_reason": result.finish_reason, "stats": result.stats.as_dict()}
        print_json(row | ({"check": checked} if checked else {}))
    else:
        _report(name, result, checked, [spec.kind for spec in decoder.recipe.drafters])
    return int(checked is not None and not checked["identical"])


def _streamed(decoder: Decoder, ids: list[int], options: dict) -> Generation:
    """Text as it comes, on stdout: unchanged in a pipe or a file, with visible escapes on a terminal, which would obey them."""
    import sys

    from skipsearch.cli.outside import for_stream
    from skipsearch.decoding import Generation

    tokens, text = [], ""
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


def _report(name: str, result: Generation, checked: dict | None, kinds: list[str]) -> None:
    from skipsearch.cli.common import err

    stats, pace = result.stats, result.stats.seconds_per_token
    line = f"{name}: {stats.tokens} tokens ({result.finish_reason})"
    if pace:
        line += f", {1 / pace:.0f} tokens/s after a prefill of {stats.prefill_seconds:.2f} s, τ {stats.tau:.2f}"
    if stats.alpha is not None:
        line += f", α {stats.alpha:.2f}"
    if len(stats.by_drafter) > 1:
        parts = (f"{kind} {d.accepted} of {d.drafted}" for kind, d in zip(kinds, stats.by_drafter, strict=True))
        line += f", accepted of drafted: {', '.join(parts)}"
    err.print(line, style="dim")
    if checked and checked["identical"]:
        plain = checked["plain_seconds_per_token"]
        ratio = f": {plain / pace:.2f}× of plain decoding's {1 / plain:.0f} tokens/s" if plain and pace else ""
        err.print(f"tokens identical to plain decoding{ratio}", style="green")
    elif checked:
        err.print(f"tokens differ from plain decoding at {checked['first_difference']}, where the two likeliest tokens are "
                  f"{checked['logit_gap']:.2g} apart in logits", style="red")
