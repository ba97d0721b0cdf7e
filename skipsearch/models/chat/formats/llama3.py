"""Llama 3: bare JSON, which is the whole answer."""

from skipsearch.models.chat.tool_formats import ToolFormat

LLAMA_3 = ToolFormat(
    "Llama 3",
    '{"name": "$name", "parameters": $arguments}',
    template_marks=('"parameters"',),
    also=('<|python_tag|>{"name": "$name", "parameters": $arguments}',),
    separator="; ",
)
