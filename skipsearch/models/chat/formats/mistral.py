"""Mistral: a list in JSON, and later a bare name with arguments in JSON."""

from skipsearch.models.chat.tool_formats import ToolFormat

MISTRAL = ToolFormat(
    "Mistral",
    '{"name": "$name", "arguments": $arguments}',
    template_marks=("[TOOL_CALLS]",),
    begin="[TOOL_CALLS][",
    separator=", ",
    end="]",
)
MISTRAL_ARGS = ToolFormat(
    "Mistral with [ARGS]",
    "[TOOL_CALLS]$name[ARGS]$arguments",
    template_marks=("[TOOL_CALLS]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
)
MISTRAL_IDS = ToolFormat(
    "Mistral with [CALL_ID]",
    "[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments",
    template_marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
)
