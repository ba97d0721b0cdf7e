"""Kimi K2: a section of numbered calls."""

from skipsearch.models.chat.tool_formats import ToolFormat

KIMI = ToolFormat(
    "Kimi K2",
    "<|tool_call_begin|>functions.$name:$number"
    "<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    template_marks=("<|tool_calls_section_begin|>",),
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    trigger="<|tool_calls_section_begin|>",
)
