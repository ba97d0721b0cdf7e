"""gpt-oss: messages in channels (harmony)."""

from skipsearch.models.chat.tool_formats import ToolFormat

GPT_OSS = ToolFormat(
    "gpt-oss",
    "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments<|call|>",
    template_marks=("<|channel|>", "functions."),
    also=(
        "<|channel|>commentary to=functions.$name json<|message|>$arguments<|call|>",
        "<|channel|>commentary to=functions.$name<|message|>$arguments<|call|>",
        "to=functions.$name<|channel|>commentary <|constrain|>json<|message|>$arguments<|call|>",
        "to=functions.$name<|channel|>commentary json<|message|>$arguments<|call|>",
    ),
    separator="<|start|>assistant",
    # The heads of messages, and what the model only thinks.
    dropped=r"<\|start\|>assistant|<\|channel\|>analysis<\|message\|>.*?<\|end\|>"
    r"|<\|channel\|>(?:commentary|final)<\|message\|>|<\|(?:end|return)\|>",
)
