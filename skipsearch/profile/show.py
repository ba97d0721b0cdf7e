"""Show a profile in the terminal: a few lines of text, and a drawing of its mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DrafterStats
from skipsearch.profile.measurement import NOT_COMPARED, Lossless
from skipsearch.profile.schema import DrafterCounts, Measurement, Profile

_VERDICTS = {
    "speculate": "speculate: decoding with it was faster than plain decoding",
    "plain": "plain: nothing beat plain decoding there, so decoding runs plain; what follows is "
    "the best that lost",
    "unmeasured": "unmeasured: imported, never timed; decoding with it is lossless, its speed is "
    "unknown",
}
_LEGEND = {  # short words of a recipe -> their meaning
    "up to": "up to N: most tokens drafted in a round",
    "confidence 0": "confidence C: a draft ends below probability C",
    "adaptive 0": "adaptive C for A: C moves until the share A of drafted tokens is accepted",
    "fixed": "fixed: a draft never ends early",
    "sibling": "siblings below C: alternatives of tokens less probable than C are verified, too",
    "per matched": "per matched token: longer matches copy more",
}
_LABEL_WIDTH = 6
_RUN_STYLE, _SKIP_STYLE = Style(color="green"), Style(dim=True)


def describe_profile(profile: Profile) -> list[str]:
    """Return lines on a profile's purpose, drafters and measurements, most important first."""
    model, task = profile.model, profile.task
    lines = [
        f"model    {model.id}{'@' + model.revision if model.revision else ''}, {model.family}, "
        f"{model.n_layers} layers, "
        f"{model.dtype or 'any dtype'}{', ' + model.quantization if model.quantization else ''}",
        f"task     {task.name}{f' version {task.version}' if task.version else ''}, temperature "
        f"{task.sampling.temperature:g}"
        f"{', prompts in the chat template' if task.is_chat else ''}",
        f"device   {describe_device(profile)}",
        f"verdict  {_VERDICTS[profile.verdict]}",
        *_drafter_lines(profile),
    ]
    if profile.measured:
        lines += _measurement_lines(profile.measured)
    made = profile.provenance
    by = [
        made.searcher,
        made.objective,
        f"{made.trials} trials" if made.trials is not None else None,
        made.created,
        made.source,
    ]
    return [*lines, f"made by  {', '.join(part for part in by if part)}"]


def _drafter_lines(profile: Profile) -> list[str]:
    """Return `drafts   lookup: 2 tokens must match, copies up to 8`, then lines `or else  …`."""
    drafters = [str(drafter) for drafter in profile.measured_recipe.drafters] or ["nothing"]
    return [f"{'or else' if i else 'drafts':<8} {drafter}" for i, drafter in enumerate(drafters)]


def describe_device(profile: Profile) -> str:
    """Return the device that a profile was measured on, or that it was not measured."""
    if profile.hardware is None:
        return "none: not measured"
    device = profile.hardware
    count = f"{device.count} × " if device.count > 1 else ""
    plural = "s" if device.threads and device.threads > 1 else ""
    threads = f", {device.threads} thread{plural}" if device.threads else ""
    return f"{count}{device.name}{threads}, engine {profile.engine}"


def explain_terms(recipes: Sequence[str], width: int = 0) -> list[str]:
    """Explain the short words that occur in these recipes, in lines of `width` characters.

    A line is longer only if a single explanation is.
    """
    text, lines = "; ".join(recipes), list[str]()
    for meaning in (meaning for word, meaning in _LEGEND.items() if word in text):
        if lines and len(lines[-1]) + len(meaning) + 2 <= width:
            lines[-1] += f"; {meaning}"
        else:
            lines.append(meaning)
    return lines


def format_speedup(profile: Profile) -> str:
    """Return `1.337× (1.31–1.366)`, or the verdict if no speedup was measured."""
    return profile.measured.speedup.format_with_unit("×") if profile.measured else profile.verdict


def format_counts(counts: DrafterCounts | DrafterStats) -> str:
    """Return `120 rounds, 480 tokens drafted, 300 accepted (62%), 90 siblings beside them`."""
    share = f" ({counts.accepted / counts.drafted:.0%})" if counts.drafted else ""
    siblings = f", {counts.siblings} siblings beside them" if counts.siblings else ""
    return (
        f"{counts.rounds} rounds, {counts.drafted} tokens drafted, "
        f"{counts.accepted} accepted{share}{siblings}"
    )


def _stream_lines(measurement: Measurement) -> list[str]:
    parts = (
        []
        if measurement.stream is None
        else [
            ("while it learned", measurement.stream.learning),
            ("once it had", measurement.stream.settled),
        ]
    )
    return [
        f"stream   {when}: {part.speedup.format_with_unit('×')} on {part.prompts} prompts, "
        f"{part.choosing_share:.1%} of the time for choosing"
        for when, part in parts
        if part is not None
    ]


def format_batch_speedups(measurement: Measurement) -> str:
    """Return `1.34× of 1, 1.08× of 4, 0.91× of 8; plain from 8 on`."""
    sizes = ", ".join(f"{row.speedup.mean:.2f}× of {row.requests}" for row in measurement.by_batch)
    return (
        sizes
        if measurement.plain_from_batch is None
        else f"{sizes}; plain from {measurement.plain_from_batch} on"
    )


def describe_prompts(measurement: Measurement) -> str:
    """Return how many prompts were measured, and why not all of them if some were left."""
    reasons = {"narrow": " (enough for ±5 %)", "time_over": " (until the budget was spent)"}
    return f"{measurement.prompts} hold-out prompts{reasons.get(measurement.stopped or '', '')}"


def describe_request_speedup(measurement: Measurement) -> str:
    """Return the speedup of whole requests, after a semicolon; empty if it was not measured."""
    if measurement.request_speedup is None:
        return ""
    return f"; whole requests, with reading the prompt: {measurement.request_speedup.mean:.2f}×"


def _measurement_lines(measurement: Measurement) -> list[str]:
    figures = {
        "α": measurement.alpha,
        "accepted": measurement.accepted_fraction,
        "τ": measurement.tau,
        "β": measurement.beta,
        "v": measurement.verify_ratio,
    }
    rounds = ", ".join(f"{name} {value:g}" for name, value in figures.items() if value is not None)
    return [
        f"speedup  {measurement.speedup.format_with_unit('×')} on "
        f"{describe_prompts(measurement)}, {measurement.tokens} tokens"
        f"{describe_request_speedup(measurement)}",
        f"time     {measurement.ms_per_token.format_with_unit(' ms')} a token, plain decoding "
        f"{measurement.baseline_ms_per_token.format_with_unit(' ms')}",
        f"rounds   {rounds}",
        *(f"{counts.kind:<8} {format_counts(counts)}" for counts in measurement.by_drafter),
        *(
            [
                f"choosing {measurement.choosing_share:.1%} of the time, for masks chosen while "
                "decoding"
            ]
            if measurement.choosing_share
            else []
        ),
        *_stream_lines(measurement),
        *(
            [f"copied   {measurement.copied_from_prompt:.0%} of the tokens, from the prompt"]
            if measurement.copied_from_prompt
            else []
        ),
        *(
            [f"memory   {measurement.draft_bytes / 1e6:,.0f} MB for drafts, besides the model"]
            if measurement.draft_bytes
            else []
        ),
        *([f"batches  {format_batch_speedups(measurement)}"] if measurement.by_batch else []),
        f"answers  {describe_endings(measurement)}",
        f"lossless {describe_losslessness(measurement.lossless)}",
    ]


def describe_losslessness(lossless: Lossless) -> str:
    """Return how many answers equal those of plain decoding."""
    if not lossless.prompts:
        return NOT_COMPARED
    return f"{lossless.identical} of {lossless.prompts} prompts identical to plain decoding"


def describe_endings(measurement: Measurement) -> str:
    """Return how the measured answers ended."""
    if measurement.measures_beginnings:
        return (
            f"{measurement.ended_on_repeat} of {measurement.prompts} were measured up to their "
            "first repeated 6-gram only, so the speedup is too high: tune again"
        )
    reasons = measurement.finish_reasons
    if reasons is None:
        return f"{measurement.prompts}, none cut at a repeated 6-gram"
    return f"{reasons.end} ended by themselves, {reasons.loop} looped, {reasons.cut} were cut"


def draw_mask(mask: SkipMask) -> RenderableType:
    """Draw sub-layers that run as blocks and skipped ones as dots, wrapped to the terminal.

    A ruler of layer numbers is above the drawing; a legend is added if it fits.

    layer 0    5    10   15    █ runs, · skipped in drafts
    attn  ███··███████████
    mlp   ███████·████████
    """
    return _MaskDrawing(mask)


@dataclass(frozen=True, slots=True)
class _MaskDrawing:
    mask: SkipMask

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run, skip = ("#", ".") if options.ascii_only else ("█", "·")
        width = max(5, (options.max_width - _LABEL_WIDTH - 1) // 5 * 5)  # the ruler's step is 5
        legend = f"   {run} runs, {skip} skipped in drafts"
        rows = {"attn": set(self.mask.attn), "mlp": set(self.mask.mlp)}
        for start in range(0, self.mask.n_layers, width):
            layers = range(start, min(start + width, self.mask.n_layers))
            ticks = "".join(f"{i:<5}" for i in layers if i % 5 == 0).rstrip()
            ruler = f"{'layer':<{_LABEL_WIDTH}}{ticks}"
            fits = start == 0 and len(ruler) + len(legend) < options.max_width
            yield Segment(f"{ruler}{legend if fits else ''}\n", _SKIP_STYLE)
            for label, skipped in rows.items():
                yield Segment(f"{label:<{_LABEL_WIDTH}}")
                for layer in layers:
                    if layer in skipped:
                        yield Segment(skip, _SKIP_STYLE)
                    else:
                        yield Segment(run, _RUN_STYLE)
                yield Segment.line()
