"""Hermes, Qwen 2.5 and Qwen 3: JSON between tags."""

from skipsearch.models.chat.tool_formats import ToolFormat

HERMES = ToolFormat(
    "Hermes and Qwen",
    '<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>',
    template_marks=("<tool_call>",),
    separator="\n",
    # Small models of Qwen forget the tags.
    fences=(("```json", "```"), ("```", "```"), ("<tools>", "</tools>"), ("", "")),
    trigger="<tool_call>",
)
