"""`skipsearch decode --side-by-side`: the same prompt plainly and with a profile, as it came.

Both decode the prompt a few times in turns. Then the run of median duration of each is played on
the terminal, in colours of the drafters, and slowly enough to be watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from skipsearch.cli.terminal import Terminal, escape_controls
from skipsearch.core.sizes import format_tokens_per_s
from skipsearch.decoding.recording import Recording, record_answer

if TYPE_CHECKING:
    from skipsearch.decoding import Decoder

RUNS = 3  # of each decoder, in turns
MIN_PLAY_S = 4.0  # a shorter run is played more slowly
FRAME_S = 1 / 20
TEXT_LINES = 9  # of each text on the terminal: the latest ones
PANEL_LINES = TEXT_LINES + 2
COLOURS = ("bold green", "bold blue", "bold magenta", "bold yellow")  # by place in the recipe


def record_in_turns(
    decoders: Sequence[Decoder], ids: Sequence[int], options: dict[str, Any]
) -> list[Recording]:
    """Return the run of median duration of each decoder."""
    runs = [[record_answer(decoder, ids, options) for decoder in decoders] for _ in range(RUNS)]
    return [
        sorted(of_one, key=lambda run: run.duration_s)[RUNS // 2]
        for of_one in zip(*runs, strict=True)
    ]


def draw_text(recording: Recording, seconds: float) -> Text:
    """Return the text that was there after so many seconds, coloured by drafter."""
    text = Text()
    for one in recording.rounds:
        if one.at_s > seconds:
            break
        style = "" if one.drafter is None else COLOURS[one.drafter % len(COLOURS)]
        text.append(escape_controls(one.accepted, multiline=True), style=style)
        text.append(escape_controls(one.own, multiline=True))
    return text


def show_side_by_side(
    console: Terminal, plain: Recording, drafted: Recording, kinds: Sequence[str]
) -> None:
    """Play two runs at once, if the console is a terminal, and print what they took."""
    slowdown = max(1.0, MIN_PLAY_S / max(plain.duration_s, 1e-9))
    if console.is_terminal:
        _play(console, plain, drafted, slowdown)
        legend = Text("colours: ")
        for place, kind in enumerate(kinds):
            legend.append(f"{kind}  ", style=COLOURS[place % len(COLOURS)])
        console.print(legend.append("the full model's own token"))
        if slowdown > 1:
            console.print(f"played {slowdown:.0f} times slower than it ran", style="dim")
    else:
        console.print_block(draw_text(drafted, drafted.duration_s).plain)
    same = "the same tokens" if plain.tokens == drafted.tokens else "DIFFERENT tokens"
    if not (plain.duration_s and drafted.duration_s):  # only the token of the prefill
        console.print(f"one round alone, so there is nothing to compare: {same}")
        return
    console.print(
        f"plain {1e3 * plain.duration_s:.0f} ms, with the profile {1e3 * drafted.duration_s:.0f} "
        f"ms: {plain.duration_s / drafted.duration_s:.2f} times as fast on this prompt, {same}"
    )


def _play(console: Terminal, plain: Recording, drafted: Recording, slowdown: float) -> None:
    started = perf_counter()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            seconds = (perf_counter() - started) / slowdown
            live.update(_draw(console, plain, drafted, seconds), refresh=True)
            if seconds >= max(plain.duration_s, drafted.duration_s):
                return
            sleep(FRAME_S)


def _draw(console: Terminal, plain: Recording, drafted: Recording, seconds: float) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    panels = []
    for title, run in (("plain", plain), ("with the profile", drafted)):
        text = draw_text(run, seconds)
        lines = text.wrap(console, console.width // 2 - 4)[-TEXT_LINES:]
        is_done = seconds >= run.duration_s
        pace = f"{format_tokens_per_s(run.tokens_per_second)} tokens/s" if is_done else "…"
        panels.append(
            Panel(
                Text("\n").join(lines),
                title=f"{title}, {pace}",
                height=PANEL_LINES,
                border_style="green" if is_done else "dim",
            )
        )
    grid.add_row(*panels)
    return grid
