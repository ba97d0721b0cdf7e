"""The forms of calls that are known, and which of them a chat template shows.

A chat template shows which form its model was trained on. `tool_formats.py` says what a form is.
"""

from skipsearch.models.chat.formats.deepseek import DEEPSEEK_3, DEEPSEEK_3_1
from skipsearch.models.chat.formats.gemma import FUNCTION_GEMMA, GEMMA_4
from skipsearch.models.chat.formats.glm import GLM
from skipsearch.models.chat.formats.gpt_oss import GPT_OSS
from skipsearch.models.chat.formats.hermes import HERMES
from skipsearch.models.chat.formats.kimi import KIMI
from skipsearch.models.chat.formats.llama3 import LLAMA_3
from skipsearch.models.chat.formats.minimax import MINIMAX
from skipsearch.models.chat.formats.mistral import MISTRAL, MISTRAL_ARGS, MISTRAL_IDS
from skipsearch.models.chat.formats.qwen3_coder import QWEN3_CODER
from skipsearch.models.chat.tool_formats import ToolFormat

# Llama 3's mark is in templates of other forms, too, so it is the last one.
TOOL_FORMATS = (
    QWEN3_CODER,
    GLM,
    HERMES,
    MISTRAL_IDS,
    MISTRAL_ARGS,
    MISTRAL,
    DEEPSEEK_3,
    DEEPSEEK_3_1,
    KIMI,
    MINIMAX,
    GPT_OSS,
    FUNCTION_GEMMA,
    GEMMA_4,
    LLAMA_3,
)
# Marks of forms that cannot be read. Their templates may also have a mark of the table.
UNKNOWN_FORMS = {
    "｜DSML｜": "DeepSeek V3.2's XML",
    "<|tool_call_start|>": "the calls in Python of LFM2",
    "<|START_ACTION|>": "Command R7B's actions",
    "<longcat_arg_key>": "LongCat's XML",
}


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the form of calls that a chat template shows; None if it shows none of the table.

    Of several, the form with the most marks is meant; of those, the first.
    """
    if any(mark in template for mark in UNKNOWN_FORMS):
        return None
    shown = [form for form in TOOL_FORMATS if all(mark in template for mark in form.template_marks)]
    return max(shown, key=lambda form: len(form.template_marks), default=None)


__all__ = [
    "GLM",
    "HERMES",
    "QWEN3_CODER",
    "TOOL_FORMATS",
    "UNKNOWN_FORMS",
    "ToolFormat",
    "detect_tool_format",
]
