"""MiniMax M2: calls and their parameters in XML."""

from skipsearch.models.chat.tool_formats import Fields, ToolFormat

MINIMAX = ToolFormat(
    "MiniMax M2",
    '<invoke name="$name">\n$arguments</invoke>\n',
    template_marks=("<minimax:tool_call>", "<invoke name=", "<parameter name="),
    begin="<minimax:tool_call>\n",
    end="</minimax:tool_call>",
    fields=Fields('<parameter name="$key">$value</parameter>\n'),
    trigger="<minimax:tool_call>",
)
