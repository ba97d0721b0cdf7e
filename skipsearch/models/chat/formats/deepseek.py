"""DeepSeek V3 and R1, whose arguments are fenced, and V3.1, whose are not."""

from skipsearch.models.chat.tool_formats import ToolFormat

DEEPSEEK_3 = ToolFormat(
    "DeepSeek V3",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    template_marks=("<｜tool▁calls▁begin｜>", "```json"),
    begin="<｜tool▁calls▁begin｜>",
    separator="\n",
    end="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
)
DEEPSEEK_3_1 = ToolFormat(
    "DeepSeek V3.1",
    "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
    template_marks=("<｜tool▁calls▁begin｜>",),
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
)
