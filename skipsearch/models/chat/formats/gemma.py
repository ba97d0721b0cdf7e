"""FunctionGemma and Gemma 4: an object with bare keys and marks around texts."""

from skipsearch.models.chat.tool_formats import Fields, ToolFormat

FUNCTION_GEMMA = ToolFormat(
    "FunctionGemma",
    "<start_function_call>call:$name{$arguments}<end_function_call>",
    template_marks=("<start_function_call>",),
    fields=Fields("$key:$value", separator=",", quote="<escape>"),
    trigger="<start_function_call>",
)
GEMMA_4 = ToolFormat(
    "Gemma 4",
    "<|tool_call>call:$name{$arguments}<tool_call|>",
    template_marks=("<|tool_call>", "<tool_call|>"),
    fields=Fields("$key:$value", separator=",", quote='<|"|>'),
    trigger="<|tool_call>",
)
