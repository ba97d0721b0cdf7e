"""A profile in a few lines of plain words, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.profile.schema import DrafterCounts, Measured, Profile

_VERDICTS = {
    "speculate": "speculate: decoding with it was faster than plain decoding",
    "plain": "plain: nothing beat plain decoding there, so decoding runs plain; what follows is the best that lost",
    "unmeasured": "unmeasured: imported, never timed; decoding with it is lossless, its speed is unknown",
}
_WORDS = {   # what a recipe says in short -> what that means
    "up to": "up to N: most tokens drafted in a round",
    "confidence 0": "confidence C: a draft ends below probability C",
    "adaptive 0": "adaptive C for A: C moves until the share A of drafted tokens is accepted",
    "sibling": "siblings below C: alternatives are verified too",
    "per matched": "per matched token: longer matches copy more",
}


def describe(profile: Profile) -> list[str]:
    """What it is for, what it does and what was measured, most important first."""
    model, task = profile.model, profile.task
    lines = [
        f"model    {model.id}{'@' + model.revision if model.revision else ''}, {model.family}, {model.n_layers} layers, "
        f"{model.dtype or 'any dtype'}{', ' + model.quantization if model.quantization else ''}",
        f"task     {task.name}{f' version {task.version}' if task.version else ''}, temperature {task.sampling.temperature:g}"
        f"{', prompts in the chat template' if task.chat_template_sha256 else ''}",
        f"device   {device(profile)}",
        f"verdict  {_VERDICTS[profile.verdict]}",
        *_drafts(profile),
    ]
    if profile.measured:
        lines += _measured(profile.measured)
    made = profile.provenance
    by = [made.searcher, made.objective, f"{made.trials} trials" if made.trials is not None else None, made.created, made.source]
    return [*lines, f"made by  {', '.join(part for part in by if part)}"]


def _drafts(profile: Profile) -> list[str]:
    """`drafts   lookup: 2 tokens must match, copies up to 8`, and for each drafter that is asked after it `or else  …`."""
    drafters = [str(drafter) for drafter in profile.candidate.drafters] or ["nothing"]
    return [f"{'or else' if i else 'drafts':<8} {drafter}" for i, drafter in enumerate(drafters)]


def device(profile: Profile) -> str:
    """Where it was measured, or that it was not."""
    if profile.hardware is None:
        return "none: not measured"
    here = profile.hardware
    count = f"{here.count} × " if here.count > 1 else ""
    threads = f", {here.threads} thread{'s' if here.threads > 1 else ''}" if here.threads else ""
    return f"{count}{here.name}{threads}, engine {profile.engine}"


def legend(recipes: Sequence[str], width: int = 0) -> list[str]:
    """What the short words of these recipes mean: each that occurs, in lines of at most `width` characters where that is possible."""
    said, lines = "; ".join(recipes), list[str]()
    for meaning in (meaning for word, meaning in _WORDS.items() if word in said):
        if lines and len(lines[-1]) + len(meaning) + 2 <= width:
            lines[-1] += f"; {meaning}"
        else:
            lines.append(meaning)
    return lines


def speedup(profile: Profile) -> str:
    """`1.337× (1.31–1.366)`, or the verdict where no speedup was measured."""
    return profile.measured.speedup.in_words("×") if profile.measured else profile.verdict


def brought(counts: DrafterCounts) -> str:
    """`120 rounds, 480 tokens drafted, 300 accepted (62%), 90 siblings beside them`"""
    share = f" ({counts.accepted / counts.drafted:.0%})" if counts.drafted else ""
    beside = f", {counts.siblings} siblings beside them" if counts.siblings else ""
    return f"{counts.rounds} rounds, {counts.drafted} tokens drafted, {counts.accepted} accepted{share}{beside}"


def _stream(found: Measured) -> list[str]:
    parts = [] if found.stream is None else [("while it learned", found.stream.learning), ("once it had", found.stream.settled)]
    return [f"stream   {when}: {part.speedup.in_words('×')} on {part.prompts} prompts, {part.choosing_share:.1%} of the time for choosing"
            for when, part in parts if part is not None]


def side_by_side(found: Measured) -> str:
    """`1.34× of 1, 1.08× of 4, 0.91× of 8; plain from 8 on`"""
    sizes = ", ".join(f"{row.speedup.mean:.2f}× of {row.requests}" for row in found.by_batch)
    return sizes if found.plain_from is None else f"{sizes}; plain from {found.plain_from} on"


def _measured(found: Measured) -> list[str]:
    figures = {"α": found.alpha, "accepted": found.accepted_fraction, "τ": found.tau, "β": found.beta, "v": found.verify_ratio}
    rounds = ", ".join(f"{name} {value:g}" for name, value in figures.items() if value is not None)
    return [
        f"speedup  {found.speedup.in_words('×')} on {found.prompts} held-out prompts, {found.tokens} tokens",
        f"time     {found.ms_per_token.in_words(' ms')} a token, plain decoding {found.baseline_ms_per_token.in_words(' ms')}",
        f"rounds   {rounds}",
        *(f"{counts.kind:<8} {brought(counts)}" for counts in found.by_drafter),
        *([f"choosing {found.choosing_share:.1%} of the time, for masks chosen while decoding"] if found.choosing_share else []),
        *_stream(found),
        *([f"copied   {found.copied_from_prompt:.0%} of the tokens, from the prompt"] if found.copied_from_prompt else []),
        *([f"batches  {side_by_side(found)}"] if found.by_batch else []),
        f"lossless {found.lossless.identical} of {found.lossless.prompts} prompts identical to plain decoding"]
