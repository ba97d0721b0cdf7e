"""How text is split before byte-level BPE, by the name in a GGUF file (`tokenizer.ggml.pre`).

A name stands for a list of patterns. Each splits the parts that the one before it made, into its
matches and what lies between them. The names are those of llama.cpp, the patterns those of the
models' publishers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """How a vocabulary wants its text."""

    patterns: tuple[str, ...]
    keeps_words: bool = False  # a part that is a token stays one, whatever the merges
    adds_bos: bool = False  # unless the file says otherwise

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the splits, then the alphabet of bytes."""
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words_and_digits(max_digits: int, letters: str = r"\p{L}", signs: str = _SIGNS) -> str:
    digits = r"\p{N}" if max_digits == 1 else rf"\p{{N}}{{1,{max_digits}}}"
    return rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{signs}|{_BLANKS}"


def _split_by_case(ending: str, digits: str, signs: str, exclude: str = "") -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"[{_UPPER}{exclude}]", f"[{_LOWER}{exclude}]"
    words = f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_BLANKS}"


_LLAMA3 = _words_and_digits(3)
_QWEN2 = _words_and_digits(1)
_GPT4O = _split_by_case(_SHORT + "?", r"\p{N}{1,3}", r"[\r\n/]*")
_WORDS_OF_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    "\\s?[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u10d0-\u10ff]]+",  # Georgian has no capitals there
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "|".join(
    [*(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s{1}"]
)
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _split_by_case(_SHORT + "?", r"\p{N}", r"[\r\n/]*"),
)
# llama.cpp's, for a file without a name.
DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_BY_NAMES = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), keeps_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), keeps_words=True
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer(
        (_QWEN2,)
    ),
    "qwen35": PreTokenizer(
        (_words_and_digits(1, r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
    ),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(_SHORT + "|"),)),
    "seed-coder": PreTokenizer((_words_and_digits(1, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)
    ),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert roberta-bpe mpt olmo jais trillion exaone4 "
    "granite-docling jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code": PreTokenizer(
        (_GPT2,)
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer(
        (_DIGIT, _GPT2)
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK_V3),
    "tekken": PreTokenizer(
        (_split_by_case("", _DIGIT, r"[\r\n/]*"),), keeps_words=True, adds_bos=True
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "kimi-k2": PreTokenizer(
        (r"\p{Han}+|" + _split_by_case(_SHORT + "?", r"\p{N}{1,3}", r"[\r\n]*", r"&&[^\p{Han}]"),)
    ),
    "jais-2": PreTokenizer((_JAIS2,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "youtu": PreTokenizer(_YOUTU, keeps_words=True),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_WORDS_OF_BLOOM,)),
    "viking": PreTokenizer((_WORDS_OF_BLOOM, _DIGIT)),
}
PRE_TOKENIZERS = {name: pre for names, pre in _BY_NAMES.items() for name in names.split()}
