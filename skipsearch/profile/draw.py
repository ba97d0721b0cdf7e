"""A mask in the terminal: one row for attention, one for the MLPs, a ruler of layers above."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style

from skipsearch.mask import SkipMask

_LABEL = 6
_KEPT, _SKIPPED = Style(color="green"), Style(dim=True)


def draw_mask(mask: SkipMask) -> RenderableType:
    """Kept sub-layers as blocks, skipped ones as dots, wrapped to the terminal's width, and what either means where there is room.

        layer 0    5    10   15    █ runs, · skipped in drafts
        attn  ███··███████████
        mlp   ███████·████████
    """
    return _Drawing(mask)


@dataclass(frozen=True, slots=True)
class _Drawing:
    mask: SkipMask

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, skipped = ("#", ".") if options.ascii_only else ("█", "·")
        width = max(5, (options.max_width - _LABEL - 1) // 5 * 5)  # a multiple of the ruler's step
        legend = f"   {kept} runs, {skipped} skipped in drafts"
        rows = {"attn": set(self.mask.attn), "mlp": set(self.mask.mlp)}
        for start in range(0, self.mask.n_layers, width):
            layers = range(start, min(start + width, self.mask.n_layers))
            ruler = f"{'layer':<{_LABEL}}{''.join(f'{i:<5}' for i in layers if i % 5 == 0).rstrip()}"
            fits = start == 0 and len(ruler) + len(legend) < options.max_width
            yield Segment(f"{ruler}{legend if fits else ''}\n", _SKIPPED)
            for label, out in rows.items():
                yield Segment(f"{label:<{_LABEL}}")
                for layer in layers:
                    yield Segment(skipped, _SKIPPED) if layer in out else Segment(kept, _KEPT)
                yield Segment.line()
