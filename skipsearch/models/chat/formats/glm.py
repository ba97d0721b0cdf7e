"""GLM 4.5 and later: a name, then keys and values in XML."""

from skipsearch.models.chat.tool_formats import Fields, ToolFormat

GLM = ToolFormat(
    "GLM",
    "<tool_call>$name\n$arguments</tool_call>",
    template_marks=("<tool_call>", "<arg_key>"),
    separator="\n",
    fields=Fields("<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"),
    trigger="<tool_call>",
)
