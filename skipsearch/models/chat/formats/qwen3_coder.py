"""Qwen3-Coder: a function and its parameters in XML."""

from skipsearch.models.chat.tool_formats import Fields, ToolFormat

QWEN3_CODER = ToolFormat(
    "Qwen3-Coder",
    "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
    template_marks=("<function=", "<parameter="),
    also=("<function=$name>\n$arguments</function>\n</tool_call>",),
    separator="\n",
    fields=Fields("<parameter=$key>\n$value\n</parameter>\n"),
    trigger="<tool_call>",
)
