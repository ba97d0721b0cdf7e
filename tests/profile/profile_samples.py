"""Profiles to test with: one of each verdict, and a strategy for all there can be."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from skipsearch.fields import Interval
from skipsearch.profile.schema import (
    AdaptiveExit,
    ConfidenceExit,
    ContextTokens,
    FixedExit,
    Hardware,
    Lossless,
    Measured,
    ModelInfo,
    Profile,
    Provenance,
    Sampling,
    SkipDrafter,
    Software,
    TaskInfo,
)

GOLDEN = Path(__file__).parent / "golden"
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0)


def speculate() -> Profile:
    return Profile(
        schema_version=1,
        model=ModelInfo(id="demo", revision=None, family="llama", n_layers=16, config_sha256="c0" * 32, weights_sha256="ab" * 32,
                        dtype="float32", quantization=None),
        task=TaskInfo(name="pycode", version=1, calibration_sha256="5e" * 32, sampling=GREEDY),
        hardware=Hardware(kind="cuda", name="NVIDIA H200", count=1, threads=None),
        engine="graph",
        verdict="speculate",
        drafter=SkipDrafter(attn=(3, 4), mlp=(7,)),
        draft_length=8,
        exit=AdaptiveExit(threshold=0.6, target_acceptance=0.9, step=0.01, beta1=0.5, beta2=0.9),
        measured=Measured(
            baseline_ms_per_token=Interval.rounded(4.4812, 4.4501, 4.5203),
            ms_per_token=Interval.rounded(3.3517, 3.2902, 3.4188),
            speedup=Interval.rounded(1.3370, 1.3102, 1.3655),
            alpha=0.87, accepted_fraction=0.81, tau=3.42, beta=0.52, verify_ratio=1.18, prompts=32, tokens=4096,
            context_tokens=ContextTokens(p50=180, max=412), ended_on_repeat=5, split="holdout",
            lossless=Lossless(prompts=32, identical=32, first_divergence_logit_gap=None)),
        software=Software(skipsearch="0.1.0", torch="2.13.0", transformers="5.23.0", cuda="13.0"),
        provenance=Provenance(searcher="gp", objective="wall", seed=0, trials=200, search_seconds=1184.2,
                              created="2026-01-31T12:00:00Z", commit="1234567"))


def plain() -> Profile:
    """Nothing was worth measuring: no mask, no drafts."""
    measured = speculate().measured
    assert measured is not None
    return speculate().model_copy(update={
        "verdict": "plain",
        "drafter": SkipDrafter(attn=(), mlp=()),
        "draft_length": 0,
        "exit": FixedExit(),
        "measured": measured.model_copy(update={
            "ms_per_token": measured.baseline_ms_per_token, "speedup": Interval.rounded(1.0, 1.0, 1.0), "alpha": None,
            "accepted_fraction": None, "tau": 1.0, "beta": None, "verify_ratio": None})})


def unmeasured() -> Profile:
    return Profile(
        schema_version=1,
        model=ModelInfo(id="meta-llama/Llama-2-13b-hf", revision=None, family="llama", n_layers=40, config_sha256=None,
                        weights_sha256=None, dtype=None, quantization=None),
        task=TaskInfo(name="any", version=None, calibration_sha256=None, sampling=GREEDY),
        hardware=None, engine=None, verdict="unmeasured", drafter=SkipDrafter(attn=(10, 11), mlp=(12, 39)), draft_length=12,
        exit=ConfidenceExit(threshold=0.6), measured=None, software=None,
        provenance=Provenance(searcher="import", objective=None, seed=None, trials=None, search_seconds=None, created=None,
                              commit=None, source="a paper's table, key \"llama-2-13b\""))


VERDICTS = {"speculate": speculate, "plain": plain, "unmeasured": unmeasured}

_SHA = st.binary(min_size=32, max_size=32).map(bytes.hex)
_NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
_TRICKY = ["null", "yes", "2026-01-31", "012", "1e5", "0x1F", "a: b", "# x", "[a]", "- a", "1:30", "~", "é", "模型", "😀", "'",
           '"', "\\n", "=", "<<", ".inf", "-1", "1_000", "a #b", "a,b", "{", "%", "@", "`", "!x", "&x", "*x", "? x", "|", ">"]
_PRINTABLE = st.characters(categories=["L", "N", "P", "S"], include_characters=" ")
_TEXT = st.sampled_from(_TRICKY) | st.text(_PRINTABLE, max_size=30).map(lambda text: text.strip() or "x")
_FRACTION = st.floats(0, 1)
_COUNT = st.integers(0, 10**12)


@st.composite
def _interval(draw: st.DrawFn) -> Interval:
    low, mean, high = sorted(draw(st.lists(st.floats(1e-6, 1e9), min_size=3, max_size=3)))
    return draw(st.sampled_from([Interval(mean=mean, ci95=(low, high)), Interval.rounded(mean, low, min(high, 1e8))]))


@st.composite
def _measured(draw: st.DrawFn, drafts: bool) -> Measured:
    figure = (lambda strategy: draw(strategy)) if drafts else (lambda strategy: None)
    prompts, compared = draw(st.integers(1, 10**6)), draw(st.integers(0, 10**6))
    identical = draw(st.integers(0, compared))
    p50, longest = sorted((draw(st.integers(1, 10**12)), draw(st.integers(1, 10**12))))
    return Measured(
        baseline_ms_per_token=draw(_interval()), ms_per_token=draw(_interval()), speedup=draw(_interval()),
        alpha=figure(_FRACTION), accepted_fraction=figure(_FRACTION), tau=draw(st.floats(1, 65)),
        beta=figure(st.floats(1e-9, 100)), verify_ratio=figure(st.floats(1e-9, 100)), prompts=prompts,
        tokens=draw(st.integers(1, 10**12)), context_tokens=ContextTokens(p50=p50, max=longest),
        ended_on_repeat=draw(st.integers(0, prompts)), split="holdout",
        lossless=Lossless(prompts=compared, identical=identical,
                          first_divergence_logit_gap=None if identical == compared else draw(st.floats(0, 1e6))))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any valid profile."""
    verdict = draw(st.sampled_from(sorted(VERDICTS)))
    here = (lambda strategy: None) if verdict == "unmeasured" else (lambda strategy: draw(strategy))
    known = (lambda strategy: draw(st.none() | strategy)) if verdict == "unmeasured" else here
    n_layers = draw(st.integers(1, 96))
    layers = st.sets(st.integers(0, n_layers - 1)).map(lambda chosen: tuple(sorted(chosen)))
    attn, mlp = draw(layers), draw(layers)
    if not attn and not mlp and verdict != "plain":
        attn = (n_layers - 1,)
    drafts = bool(attn or mlp)
    exits = st.just(FixedExit()) | st.builds(ConfidenceExit, threshold=_FRACTION) | st.builds(
        AdaptiveExit, threshold=_FRACTION, target_acceptance=_FRACTION, step=_FRACTION, beta1=_FRACTION, beta2=_FRACTION)
    sampling = st.builds(Sampling, temperature=st.floats(0, 100), top_p=st.floats(1e-9, 1), top_k=st.integers(0, 10**7))
    hardware = st.builds(Hardware, kind=st.sampled_from(["cpu", "cuda"]), name=_TEXT, count=st.integers(1, 4096),
                         threads=st.none() | st.integers(1, 4096))
    return Profile(
        schema_version=1,
        model=ModelInfo(id=draw(_TEXT), revision=draw(st.none() | _TEXT), family=draw(_NAME), n_layers=n_layers,
                        config_sha256=known(_SHA), weights_sha256=known(_SHA),
                        dtype=known(st.sampled_from(["float64", "float32", "bfloat16", "float16"])),
                        quantization=draw(st.none() | _TEXT)),
        task=TaskInfo(name=draw(_NAME), version=known(st.integers(1, 10**6)), calibration_sha256=known(_SHA),
                      chat_template_sha256=draw(st.none() | _SHA), sampling=draw(sampling)),
        hardware=here(hardware), engine=here(_NAME), verdict=verdict, drafter=SkipDrafter(attn=attn, mlp=mlp),
        draft_length=draw(st.integers(1, 64)) if drafts else 0, exit=draw(exits),
        measured=None if verdict == "unmeasured" else draw(_measured(drafts)),
        software=here(st.builds(Software, skipsearch=_TEXT, torch=_TEXT, transformers=_TEXT, cuda=st.none() | _TEXT)),
        provenance=Provenance(
            searcher=draw(_NAME), objective=known(st.sampled_from(["replay", "wall"])), seed=known(st.integers(0, 2**63 - 1)),
            trials=known(_COUNT), search_seconds=known(st.floats(0, 1e9)),
            created=known(st.sampled_from(["2026-01-31", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00+00:00"])),
            commit=draw(st.none() | st.sampled_from(["0123456", "1234567e89", "abcdef0-dirty", "f" * 40])),
            source=draw(st.none() | _TEXT)))
