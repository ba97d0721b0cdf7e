"""What a tokenizer may make of a text is bounded before it reads one: an upper bound that holds,
and refusals that name the file.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from skipsearch.errors import ModelError
from skipsearch.models import expansion, load_tokenizer
from skipsearch.models.chat.chat_text import encode_prompt
from skipsearch.models.expansion import (
    ALWAYS_BYTES,
    check_file,
    check_text,
    check_tokenizer,
    decode_factor,
    encode_factor,
)
from skipsearch.models.loading.hub import DEMO_FOLDER
from skipsearch.models.third_party import panics_as_errors

# of one to four bytes, with the longest decompositions of each
LETTERS = "a \u00e9\u0130\ufdfa\u4e2d\U0001d160"


def tokenizer_of(model: Any = None, **components: Any) -> Any:
    """A tokenizer whose tokens are letters, with these components."""
    inner = Tokenizer(model or models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    for name, component in components.items():
        setattr(inner, name, component)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def state(component: Any) -> Any:
    return json.loads(component.__getstate__())


NORMALIZERS = st.one_of(
    st.builds(
        normalizers.Replace, st.text(LETTERS, min_size=1, max_size=3), st.text(LETTERS, max_size=4)
    ),
    st.builds(
        lambda content: normalizers.Replace(Regex("a*"), content), st.text(LETTERS, max_size=3)
    ),
    st.builds(normalizers.Prepend, st.text(LETTERS, min_size=1, max_size=3)),
    st.sampled_from(
        [
            normalizers.NFC(),
            normalizers.NFD(),
            normalizers.NFKC(),
            normalizers.NFKD(),
            normalizers.Lowercase(),
            normalizers.BertNormalizer(),
            normalizers.ByteLevel(),
            normalizers.StripAccents(),
        ]
    ),
)


@settings(max_examples=3000, deadline=None)
@given(st.lists(NORMALIZERS, max_size=4), st.text(LETTERS, min_size=1, max_size=6))
def test_no_normalizer_makes_more_than_its_factor(steps: list[Any], text: str) -> None:
    normalizer = normalizers.Sequence(steps)
    try:
        with panics_as_errors():
            made = normalizer.normalize_str(text)
    except ValueError:  # the library has faults where nothing is replaced by something
        return
    assert len(made.encode()) <= encode_factor({"normalizer": state(normalizer)}) * (
        len(text.encode()) + 1
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                pre_tokenizers.ByteLevel(),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Metaspace(),
                pre_tokenizers.Metaspace(prepend_scheme="never"),
                pre_tokenizers.Whitespace(),
                pre_tokenizers.Split(Regex("a"), "isolated"),
                pre_tokenizers.Digits(),
            ]
        ),
        max_size=3,
    ),
    st.text(LETTERS, min_size=1, max_size=6),
)
def test_no_pre_tokenizer_makes_more_than_its_factor(steps: list[Any], text: str) -> None:
    pre_tokenizer = pre_tokenizers.Sequence(steps)
    made = sum(len(piece.encode()) for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    assert made <= encode_factor({"pre_tokenizer": state(pre_tokenizer)}) * (len(text.encode()) + 1)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_template_that_repeats_the_text_has_a_factor(times: int) -> None:
    template = processors.TemplateProcessing(single=" ".join(times * ["$A"]))
    assert len(tokenizer_of(post_processor=template)("aaa").input_ids) == 3 * times
    assert encode_factor({"post_processor": state(template)}) == times
    assert (
        encode_factor({"post_processor": state(processors.Sequence([template, template]))}) >= times
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(
                decoders.Replace, st.text("ab", min_size=1, max_size=2), st.text("ab", max_size=4)
            ),
            st.sampled_from(
                [
                    decoders.Fuse(),
                    decoders.ByteFallback(),
                    decoders.WordPiece(),
                    decoders.Metaspace(),
                ]
            ),
        ),
        max_size=4,
    ),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_no_decoder_writes_more_than_its_factor(steps: list[Any], tokens: list[str]) -> None:
    decoder = decoders.Sequence(steps)
    assert len(decoder.decode(tokens)) <= decode_factor(state(decoder)) * sum(
        len(token) + 1 for token in tokens
    )


def test_a_compiled_map_has_the_factor_of_its_longest_text() -> None:
    blob = (8).to_bytes(4, "little") + bytes(8) + b"ab\0" + 77 * b"x" + b"\0"
    assert (
        encode_factor(
            {
                "normalizer": {
                    "type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(blob).decode(),
                }
            }
        )
        == 77
    )


DOUBLING = normalizers.Sequence(40 * [normalizers.Replace("a", "aa")])
WRITES = decoders.Sequence(40 * [decoders.Replace("a", "aa")])
REFUSED: list[dict[str, Any]] = [
    {"normalizer": DOUBLING},
    {
        "normalizer": normalizers.Sequence(
            [normalizers.Sequence([normalizers.Replace(Regex("z"), 2000 * "a")])]
        )
    },
    {"normalizer": normalizers.Prepend(2000 * "a")},
    {
        "pre_tokenizer": pre_tokenizers.Sequence(
            40 * [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    },
    {"post_processor": processors.Sequence(40 * [processors.TemplateProcessing(single="$A $A")])},
    {
        "post_processor": processors.TemplateProcessing(
            single="$A" + 100_000 * " a", special_tokens=[("a", 1)]
        )
    },
    {"decoder": WRITES},
    {
        "model": models.BPE(
            {"<unk>": 0, "a": 1}, [], unk_token="<unk>", continuing_subword_prefix=2000 * "a"
        )
    },
    {
        "model": models.WordPiece(
            {"<unk>": 0, "a": 1}, unk_token="<unk>", max_input_chars_per_word=10**9
        )
    },
    {"model": models.Unigram([("<unk>", 0.0), (100_000 * "a", -1.0)], unk_id=0)},
]


@pytest.mark.parametrize("components", REFUSED, ids=lambda components: f"{next(iter(components))}")
def test_a_tokenizer_that_expands_its_input_is_refused_where_it_is_loaded(
    components: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"take the tokenizer\.json of the original model"):
        check_tokenizer(tokenizer_of(**components), tmp_path)


def test_a_normalizer_is_checked_before_added_tokens_go_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading such a file would already take all memory."""
    inner = tokenizer_of().backend_tokenizer
    data = json.loads(inner.to_str()) | {"normalizer": state(DOUBLING)}
    data["added_tokens"] = [
        {
            "id": 2,
            "content": "aaa",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": True,
            "special": False,
        }
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"may make 1.1e\+12 bytes"):
        check_file(tmp_path / "tokenizer.json")
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(ModelError, match=r"may make 1.1e\+12 bytes"):
        load_tokenizer(str(tmp_path))


def test_what_may_grow_much_reads_short_texts_only() -> None:
    tokenizer = tokenizer_of(normalizer=normalizers.Replace("a", 500 * "a"))
    check_tokenizer(tokenizer, Path())
    assert len(encode_prompt(tokenizer, "aa")) == 1000
    with pytest.raises(ModelError, match="or shorter texts"):
        encode_prompt(tokenizer, (ALWAYS_BYTES // 500 + 1) * "a")


@pytest.mark.parametrize(
    "components",
    [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},  # Llama 3, GPT-2
        {
            "normalizer": normalizers.NFC(),
            "pre_tokenizer": pre_tokenizers.Sequence(
                [  # Qwen
                    pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        },
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            ),  # Llama 2, Mistral
            "post_processor": processors.TemplateProcessing(
                single="a $A", special_tokens=[("a", 1)]
            ),
            "decoder": decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            ),
        },
        {"normalizer": normalizers.Replace(" ", "▁")},  # Gemma
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
    ],
    ids=["byte level", "Qwen", "SentencePiece", "Gemma", "Metaspace"],
)
def test_the_tokenizers_of_language_models_read_texts_of_any_length(
    components: dict[str, Any],
) -> None:
    tokenizer = tokenizer_of(**components)
    check_tokenizer(tokenizer, Path())
    check_text(tokenizer, ALWAYS_BYTES * "a")


def test_the_embedded_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    check_file(Path(DEMO_FOLDER) / "tokenizer.json")
    tokenizer, _ = load_tokenizer("demo")
    described = []
    monkeypatch.setattr(expansion, "_describe", described.append)
    assert encode_prompt(tokenizer, "a")
    assert not described, "the factor is computed once a tokenizer, and not with each text"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"normalizer": 3}', '{"normalizer": {"type": "of 2030"}}']
)
def test_a_file_that_is_no_tokenizer_is_left_to_the_loader(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    check_file(tmp_path / "tokenizer.json")
    check_file(tmp_path / "nowhere")
