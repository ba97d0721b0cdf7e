"""A real tokenizer of one token a letter, small enough for the tiny models of tests/models, that
can be saved beside their weights.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<unk>")
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ\n,():"
# As chat models have it: it brings the special tokens, and says whose turn it is.
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}ai:{% endif %}"
)


def letter_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Every text begins with <s>, as Llama's do; </s> is the end-of-sequence token; other letters
    are <unk>.
    """
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *LETTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
