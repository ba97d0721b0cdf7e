"""Profiles to test with: of each verdict, of several drafters, and a strategy for all there can
be.
"""

from __future__ import annotations

from pathlib import Path

from helpers.specs import specs
from hypothesis import strategies as st

from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import DRAFTERS, DrafterSpec, Siblings
from skipsearch.core.schema_types import DraftModelRef, Interval, ModuleRef
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.kangaroo.spec import Kangaroo
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.s3d.spec import S3D
from skipsearch.drafters.skip.spec import Skip
from skipsearch.drafters.swift.spec import SWIFT, InitialMask, SiblingSchedule
from skipsearch.errors import MaskError
from skipsearch.profile.schema import (
    MAX_DRAFTERS,
    BatchSpeed,
    ContextTokens,
    DrafterCounts,
    FinishReasons,
    Hardware,
    Lossless,
    Measurement,
    ModelInfo,
    Profile,
    ProfileSampling,
    Provenance,
    Software,
    StreamMeasurement,
    StreamPart,
    TaskInfo,
)

GOLDEN = Path(__file__).parent / "golden"
GREEDY = ProfileSampling(temperature=0.0, top_p=1.0, top_k=0)
SKIP = Skip(
    attn=(3, 4),
    mlp=(7,),
    draft_length=8,
    exit=Adaptive(threshold=0.6, target_acceptance=0.9, step=0.01, beta1=0.5, beta2=0.9),
)

ADAPTED = Adapted(
    attn=(3, 4),
    mlp=(7,),
    draft_length=6,
    exit=Confidence(threshold=0.5),
    module=ModuleRef(file="modules/adapted-5.safetensors", sha256="7a" * 32, parameters=1032192),
)

KANGAROO = Kangaroo(
    exit_layer=3,
    draft_length=6,
    exit=Confidence(threshold=0.6),
    module=ModuleRef(file="kangaroo-3.safetensors", sha256="6c" * 32, parameters=147840),
)

MTP = Mtp(
    draft_length=4,
    exit=Confidence(threshold=0.4),
    vocabulary=Vocabulary(lowest=4000, tokens="4100-4200 9000"),
    module=ModuleRef(file="mtp.safetensors", sha256="7d" * 32, parameters=4208832),
)

S3D_DRAFT = S3D(
    attn=(4, 5),
    mlp=(4, 5),
    draft_length=4,
    module=ModuleRef(file="s3d-4.safetensors", sha256="5d" * 32, parameters=576),
)


def speculate() -> Profile:
    """One skip drafter."""
    return Profile(
        schema_version=3,
        model=ModelInfo(
            id="demo",
            revision=None,
            family="llama",
            n_layers=16,
            config_sha256="c0" * 32,
            weights_sha256="ab" * 32,
            dtype="float32",
            quantization=None,
        ),
        task=TaskInfo(name="pycode", version=1, calibration_sha256="5e" * 32, sampling=GREEDY),
        hardware=Hardware(kind="cuda", name="NVIDIA H200", count=1, threads=None),
        engine="graph",
        verdict="speculate",
        drafters=(SKIP,),
        lost=(),
        measured=Measurement(
            baseline_ms_per_token=Interval.from_rounded(4.4812, 4.4501, 4.5203),
            ms_per_token=Interval.from_rounded(3.3517, 3.2902, 3.4188),
            speedup=Interval.from_rounded(1.3370, 1.3102, 1.3655),
            alpha=0.87,
            accepted_fraction=0.81,
            tau=3.42,
            beta=0.52,
            verify_ratio=1.18,
            prompts=32,
            tokens=4096,
            context_tokens=ContextTokens(p50=180, max=412),
            ended_on_repeat=5,
            split="holdout",
            lossless=Lossless(prompts=32, identical=32, first_divergence_logit_gap=None),
        ),
        software=Software(skipsearch="0.1.0", torch="2.13.0", transformers="5.23.0", cuda="13.0"),
        provenance=Provenance(
            searcher="gp",
            objective="wall",
            seed=0,
            trials=200,
            search_seconds=1184.2,
            created="2026-01-31T12:00:00Z",
            commit="1234567",
        ),
    )


def reduced() -> Profile:
    """Drafts in fewer bits, with fewer tokens, that skip nothing."""
    measured = speculate().measured
    assert measured is not None
    reading = {"weights": "int5", "vocabulary": Vocabulary(lowest=4096, tokens="5000 6001-6003")}
    return speculate().model_copy(
        update={
            "drafters": (SKIP.model_copy(update={"attn": (), "mlp": (), **reading}),),
            "measured": measured.model_copy(update={"draft_bytes": 93_000_000}),
        }
    )


def mixed() -> Profile:
    """A lookup before the mask, each drafter counted; what may be left out is there."""
    measured = speculate().measured
    assert measured is not None
    lookup = Lookup(min_match=2, draft_length=16, per_match=4)
    return speculate().model_copy(
        update={
            "drafters": (
                lookup,
                SKIP.model_copy(
                    update={"exit": SKIP.exit.model_copy(update={"across_requests": True})}
                ),
            ),
            "measured": measured.model_copy(
                update={
                    "by_drafter": (
                        DrafterCounts(kind="lookup", rounds=400, drafted=3200, accepted=1900),
                        DrafterCounts(kind="skip", rounds=700, drafted=2100, accepted=1500),
                    ),
                    "copied_from_prompt": 0.31,
                    "by_batch": (
                        BatchSpeed(requests=1, speedup=Interval.from_rounded(1.34, 1.31, 1.37)),
                        BatchSpeed(requests=4, speedup=Interval.from_rounded(1.08, 1.02, 1.13)),
                        BatchSpeed(requests=8, speedup=Interval.from_rounded(0.91, 0.88, 0.95)),
                    ),
                }
            ),
        }
    )


def every() -> Profile:
    """Every kind of drafter with every kind of exit, and one with siblings."""
    skips = [
        SKIP.model_copy(update={"exit": exit_policy})
        for exit_policy in (Fixed(), Confidence(threshold=0.25), SKIP.exit)
    ]
    beside = skips[0].model_copy(update={"siblings": Siblings(below=0.5, most=2)})
    return unmeasured().model_copy(
        update={
            "drafters": (
                Lookup(min_match=3, draft_length=5),
                beside,
                *skips[1:],
                ADAPTED,
                KANGAROO,
                S3D_DRAFT,
                MTP,
            )
        }
    )


def choosing() -> Profile:
    """Drafters that choose their masks while they decode."""
    exit_policy = Confidence(threshold=0.5)
    return unmeasured().model_copy(
        update={
            "drafters": (
                CLaSp(
                    skip=20,
                    unit="sublayer",
                    interval=64,
                    interval_unit="tokens",
                    never_skip=(0, 39),
                    draft_length=8,
                    exit=exit_policy,
                ),
                ASD(threshold=0.985, every=3, keep_last=2, draft_length=12, exit=SKIP.exit),
                SWIFT(skip_ratio=0.45, window=32, draft_length=12, exit=exit_policy),
            )
        }
    )


def with_draft_model() -> Profile:
    """Drafts of a second model, as it is and with parts left out."""
    model = DraftModelRef(
        id="small.gguf",
        weights_sha256="d4" * 32,
        n_layers=12,
        weight_bytes=98_000_000,
        dtype="float32",
        quantization="gguf-q4_k",
    )
    whole = DraftModel(model=model, draft_length=6, exit=Confidence(threshold=0.5))
    less = DraftModel(
        model=model.model_copy(update={"id": "org/small@main", "quantization": None}),
        attn=(3, 5),
        mlp=(4,),
        weights="int4",
        vocabulary=Vocabulary(lowest=4000, tokens="4100-4200 9000"),
        siblings=Siblings(below=0.5, most=2),
        draft_length=4,
        exit=SKIP.exit,
    )
    return unmeasured().model_copy(update={"drafters": (whole, less)})


def streamed() -> Profile:
    """A drafter that learns from request to request, measured on a stream."""
    measured = speculate().measured
    assert measured is not None
    swift = SWIFT(
        skip_ratio=0.45,
        window=32,
        faithful=True,
        tree=SiblingSchedule(thresholds=(0.95, 0.8, 0.5), widths=(3, 5, 8, 10)),
        warm=InitialMask(attn=(3, 5), mlp=(5, 7)),
        draft_length=25,
        exit=Confidence(threshold=0.8),
    )
    parts = (
        StreamPart(prompts=n, speedup=Interval.from_rounded(*speedup), choosing_share=share)
        for n, speedup, share in (
            (measured.prompts - 20, (1.02, 0.97, 1.07), 0.062),
            (20, (1.24, 1.16, 1.31), 0.0),
        )
    )
    return speculate().model_copy(
        update={
            "drafters": (swift,),
            "measured": measured.model_copy(
                update={
                    "choosing_share": 0.023,
                    "stream": StreamMeasurement(learning=next(parts), settled=next(parts)),
                }
            ),
        }
    )


def lost() -> Profile:
    """The best candidate did not beat plain decoding."""
    measured = speculate().measured
    assert measured is not None
    return speculate().model_copy(
        update={
            "verdict": "plain",
            "drafters": (),
            "lost": (SKIP,),
            "measured": measured.model_copy(
                update={"speedup": Interval.from_rounded(0.97, 0.95, 0.99)}
            ),
        }
    )


def plain() -> Profile:
    """Nothing was worth measuring: no mask, no drafts."""
    measured = speculate().measured
    assert measured is not None
    return speculate().model_copy(
        update={
            "verdict": "plain",
            "drafters": (),
            "measured": measured.model_copy(
                update={
                    "ms_per_token": measured.baseline_ms_per_token,
                    "speedup": Interval.from_rounded(1.0, 1.0, 1.0),
                    "alpha": None,
                    "accepted_fraction": None,
                    "tau": 1.0,
                    "beta": None,
                    "verify_ratio": None,
                }
            ),
        }
    )


def unmeasured() -> Profile:
    return Profile(
        schema_version=3,
        model=ModelInfo(
            id="meta-llama/Llama-2-13b-hf",
            revision=None,
            family="llama",
            n_layers=40,
            config_sha256=None,
            weights_sha256=None,
            dtype=None,
            quantization=None,
        ),
        task=TaskInfo(name="any", version=None, calibration_sha256=None, sampling=GREEDY),
        hardware=None,
        engine=None,
        verdict="unmeasured",
        lost=(),
        drafters=(
            Skip(attn=(10, 11), mlp=(12, 39), draft_length=12, exit=Confidence(threshold=0.6)),
        ),
        measured=None,
        software=None,
        provenance=Provenance(
            searcher="import",
            objective=None,
            seed=None,
            trials=None,
            search_seconds=None,
            created=None,
            commit=None,
            source='a paper\'s table, key "llama-2-13b"',
        ),
    )


VERDICTS = {"speculate": speculate, "plain": plain, "unmeasured": unmeasured}
SAMPLES = VERDICTS | {
    "reduced": reduced,
    "mixed": mixed,
    "every": every,
    "choosing": choosing,
    "streamed": streamed,
    "draft_model": with_draft_model,
    "lost": lost,
}

_SHA = st.binary(min_size=32, max_size=32).map(bytes.hex)
_NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
_TRICKY = [
    "null",
    "yes",
    "2026-01-31",
    "012",
    "1e5",
    "0x1F",
    "a: b",
    "# x",
    "[a]",
    "- a",
    "1:30",
    "~",
    "é",
    "模型",
    "😀",
    "'",
    '"',
    "\\n",
    "=",
    "<<",
    ".inf",
    "-1",
    "1_000",
    "a #b",
    "a,b",
    "{",
    "%",
    "@",
    "`",
    "!x",
    "&x",
    "*x",
    "? x",
    "|",
    ">",
]
_PRINTABLE = st.characters(categories=["L", "N", "P", "S"], include_characters=" ")
_TEXT = st.sampled_from(_TRICKY) | st.text(_PRINTABLE, max_size=30).map(
    lambda text: text.strip() or "x"
)
_FRACTION = st.floats(0, 1)
_COUNT = st.integers(0, 10**12)


@st.composite
def _interval(draw: st.DrawFn) -> Interval:
    low, mean, high = sorted(draw(st.lists(st.floats(1e-6, 1e9), min_size=3, max_size=3)))
    return draw(
        st.sampled_from(
            [
                Interval(mean=mean, ci95=(low, high)),
                Interval.from_rounded(mean, low, min(high, 1e8)),
            ]
        )
    )


@st.composite
def _recipe(draw: st.DrawFn, n_layers: int, least: int) -> tuple[DrafterSpec, ...]:
    """Drafters of every kind that fit the model, no two the same."""
    drafters = st.sampled_from(sorted(DRAFTERS)).flatmap(
        lambda kind: specs(DRAFTERS, kind, n_layers)
    )
    return tuple(
        draw(
            st.lists(
                drafters.filter(lambda drafter: _fits(drafter, n_layers)),
                min_size=least,
                max_size=MAX_DRAFTERS,
                unique=True,
            )
        )
    )


def _fits(drafter: DrafterSpec, n_layers: int) -> bool:
    try:
        mask = drafter.mask(n_layers)
    except MaskError:
        return False
    return mask is None or mask.n_skipped > 0


@st.composite
def _counts(draw: st.DrawFn, kind: str) -> DrafterCounts:
    drafted = draw(_COUNT)
    return DrafterCounts(
        kind=kind,
        rounds=draw(st.integers(0, drafted)),
        drafted=drafted,
        accepted=draw(st.integers(0, drafted)),
        siblings=draw(st.integers(0, 99)),
    )


@st.composite
def _measured(draw: st.DrawFn, kinds: tuple[str, ...]) -> Measurement:
    drafts, counted = bool(kinds), draw(st.booleans())
    figure = (lambda strategy: draw(strategy)) if drafts else (lambda strategy: None)
    prompts, compared = draw(st.integers(1, 10**6)), draw(st.integers(0, 10**6))
    identical = draw(st.integers(0, compared))
    p50, longest = sorted((draw(st.integers(1, 10**12)), draw(st.integers(1, 10**12))))
    return Measurement(
        baseline_ms_per_token=draw(_interval()),
        ms_per_token=draw(_interval()),
        speedup=draw(_interval()),
        alpha=figure(_FRACTION),
        accepted_fraction=figure(_FRACTION),
        tau=draw(st.floats(1, 65)),
        beta=figure(st.floats(1e-9, 100)),
        verify_ratio=figure(st.floats(1e-9, 100)),
        prompts=prompts,
        tokens=draw(st.integers(1, 10**12)),
        context_tokens=ContextTokens(p50=p50, max=longest),
        ended_on_repeat=draw(st.integers(0, prompts)),
        split="holdout",
        lossless=Lossless(
            prompts=compared,
            identical=identical,
            first_divergence_logit_gap=None if identical == compared else draw(st.floats(0, 1e6)),
        ),
        by_drafter=tuple(draw(_counts(kind)) for kind in kinds) if counted else (),
        stopped=draw(st.sampled_from([None, "narrow", "prompts_ended"])),
        request_speedup=draw(st.none() | _interval()),
        finish_reasons=draw(st.none() | st.just(FinishReasons(end=prompts, loop=0, cut=0))),
        copied_from_prompt=draw(st.none() | _FRACTION),
        by_batch=tuple(
            BatchSpeed(requests=n, speedup=draw(_interval()))
            for n in sorted(draw(st.sets(st.integers(1, 64), max_size=3)))
        ),
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any valid profile."""
    verdict = draw(st.sampled_from(sorted(VERDICTS)))
    here = (lambda strategy: None) if verdict == "unmeasured" else (lambda strategy: draw(strategy))
    known = (lambda strategy: draw(st.none() | strategy)) if verdict == "unmeasured" else here
    n_layers = draw(st.integers(1, 96))
    recipe = draw(_recipe(n_layers, least=verdict != "plain"))
    sampling = st.builds(
        ProfileSampling,
        temperature=st.floats(0, 100),
        top_p=st.floats(1e-9, 1),
        top_k=st.integers(0, 10**7),
    )
    hardware = st.builds(
        Hardware,
        kind=st.sampled_from(["cpu", "cuda"]),
        name=_TEXT,
        count=st.integers(1, 4096),
        threads=st.none() | st.integers(1, 4096),
    )
    return Profile(
        schema_version=3,
        model=ModelInfo(
            id=draw(_TEXT),
            revision=draw(st.none() | _TEXT),
            family=draw(_NAME),
            n_layers=n_layers,
            config_sha256=known(_SHA),
            weights_sha256=known(_SHA),
            dtype=known(st.sampled_from(["float64", "float32", "bfloat16", "float16"])),
            quantization=draw(st.none() | _TEXT),
        ),
        task=TaskInfo(
            name=draw(_NAME),
            version=known(st.integers(1, 10**6)),
            calibration_sha256=known(_SHA),
            chat_template_sha256=draw(st.none() | _SHA),
            sampling=draw(sampling),
        ),
        hardware=here(hardware),
        engine=here(_NAME),
        verdict=verdict,
        drafters=() if verdict == "plain" else recipe,
        lost=recipe if verdict == "plain" else (),
        measured=None
        if verdict == "unmeasured"
        else draw(_measured(tuple(drafter.kind for drafter in recipe))),
        software=here(
            st.builds(
                Software, skipsearch=_TEXT, torch=_TEXT, transformers=_TEXT, cuda=st.none() | _TEXT
            )
        ),
        provenance=Provenance(
            searcher=draw(_NAME),
            objective=known(st.sampled_from(["replay", "wall"])),
            seed=known(st.integers(0, 2**63 - 1)),
            trials=known(_COUNT),
            search_seconds=known(st.floats(0, 1e9)),
            created=known(
                st.sampled_from(["2026-01-31", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00+00:00"])
            ),
            commit=draw(
                st.none() | st.sampled_from(["0123456", "1234567e89", "abcdef0-dirty", "f" * 40])
            ),
            source=draw(st.none() | _TEXT),
        ),
    )
