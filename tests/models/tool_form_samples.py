"""Samples of the forms of tool calls, by their names in `TOOL_FORMATS`."""

from __future__ import annotations

from typing import Any

from skipsearch.models.chat.formats import TOOL_FORMATS

Calls = dict[int, tuple[str, str]]
FORMS = {form.name: form for form in TOOL_FORMATS}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "n": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "list": {"type": "array", "items": {"type": "string"}},
                    "kind": {"enum": ["x", "7"]},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]

NESTED = '{"a": "}\\"<tool_call>[{", "b": [1, {"c": 2}]}'
# (form, answer, content, calls)
ANSWERS: list[tuple[str, str, str, Calls]] = [
    (
        "Hermes and Qwen",
        f'Wait.\n<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1}, "name": "g"}\n</tool_call>',
        "Wait.",
        {0: ("f", NESTED), 1: ("g", '{"x": 1}')},
    ),
    ("Hermes and Qwen", "a < b, <tool and </tool_call>", "a < b, <tool and </tool_call>", {}),
    (
        "Hermes and Qwen",
        "<tool_call>\nno JSON\n</tool_call>",
        "<tool_call>\nno JSON\n</tool_call>",
        {},
    ),
    (
        "Hermes and Qwen",
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        {},
    ),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {"a": 1', "", {0: ("f", '{"a": 1')}),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {}}', "", {0: ("f", "{}")}),
    (  # a limit cut the second call off
        "Hermes and Qwen",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name": "g',
        "",
        {0: ("f", "{}")},
    ),
    ("Llama 3", '{"name": "f", "parameters": {}}; {"name": "g', "", {0: ("f", "{}")}),
    ("Hermes and Qwen", '<tool_call>{"name": "g"}</tool_call>', "", {0: ("g", "{}")}),
    (
        "Hermes and Qwen",
        '<tool_call>\n{{"name": "g", "arguments": {"x": 1}}}\n</tool_call>',
        "",
        {0: ("g", '{"x": 1}')},
    ),
    *(  # doubled brackets, as Qwen 2.5's template shows them, and too few or too many at the end
        ("Hermes and Qwen", f"{before}{call}{after}", "", {0: ("f", '{"a": "}}"}')})
        for before, after in (
            ("", ""),
            ("```json\n", "\n```"),
            ("```", "```"),
            ("<tools>\n", "\n</tools>"),
            ("<tool_call>\n", "\n</tool_call>"),
        )
        for call in (
            '{{"name": "f", "arguments": {"a": "}}"}}}',
            '{{"name": "f", "arguments": {"a": "}}"}}}}',
            '{{"name": "f", "arguments": {"a": "}}"}}',
            '{{"name": "f", "arguments": {{"a": "}}"}}}}',
            '{"name": "f", "arguments": {{"a": "}}"}}}',
            '{ {"arguments": {"a": "}}"}, "name": "f"} }',
        )
    ),
    (
        "Hermes and Qwen",
        '{{"name": "g", "arguments": {}}}\n{{"name": "g", "arguments": {{"x": {{"y": 1}}}}}}\nSo.',
        "So.",
        {0: ("g", "{}"), 1: ("g", '{"x": {"y": 1}}')},
    ),
    # Calls without tags are read if they fit a tool.
    (
        "Hermes and Qwen",
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "a": "```"\n  }\n}\n```',
        "",
        {0: ("f", '{"a": "```"}')},
    ),
    (
        "Hermes and Qwen",
        'I do.\n```json\n{"name": "g", "arguments": {}}\n{"name": "f", "arguments": {"a": "x"}}\n'
        "```\nDone.",
        "I do.\nDone.",
        {0: ("g", "{}"), 1: ("f", '{"a": "x"}')},
    ),
    ("Hermes and Qwen", '{"name": "g", "arguments": {"x": 1}}', "", {0: ("g", '{"x": 1}')}),
    *(
        ("Hermes and Qwen", text, text, Calls())
        for text in (
            '```json\n{"name": "f", "arguments": {"n": 1}}\n```',  # `a` is missing
            '```json\n{"name": "h", "arguments": {}}\n``` is JSON',  # no tool has this name
            '{{"name": "h", "arguments": {}}} is JSON',
            '{{"name": "f", "arguments": {"n": 1}}}',
            '```json\n{{"name": "Ada"}}\n```',
            "{{ name }} is a template",
            '```json\n{"name": "Ada", "age": 36}\n```',
            '```json\n{"name": "g", "arguments": {"x": ',
            "```python\nprint(1)\n```",
            '{"name": "Ada"} and {"name": "g", "arguments": {}}',
        )
    ),
    (
        "Qwen3-Coder",
        "So.\n<tool_call>\n<function=f>\n<parameter=a>\nif x < 3:\n    pass\n\n</parameter>\n"
        "<parameter=n>\n7\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"
        '<parameter=list>\n["x"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "So.",
        {
            0: ("f", '{"a": "if x < 3:\\n    pass\\n", "n": 7, "b": true, "list": ["x"]}'),
            1: ("g", "{}"),
        },
    ),
    (  # the model forgets the first tag
        "Qwen3-Coder",
        "<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        "",
        {0: ("f", '{"a": "7"}')},
    ),
    ("Qwen3-Coder", "The tag <tool_call> is a tag.", "The tag <tool_call> is a tag.", {}),
    (
        "MiniMax M2",
        'So.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">if x < 3:\n    pass\n'
        '</parameter>\n<parameter name="n">7</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
        "</minimax:tool_call>",
        "So.",
        {0: ("f", '{"a": "if x < 3:\\n    pass\\n", "n": 7}'), 1: ("g", "{}")},
    ),
    (
        "GLM",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>kind</arg_key>\n"
        "<arg_value>7</arg_value>\n<arg_key>maybe</arg_key>\n<arg_value>null</arg_value>\n"
        "</tool_call><tool_call>g</tool_call>",
        "",
        {0: ("f", '{"a": "7", "kind": "7", "maybe": null}'), 1: ("g", "{}")},
    ),
    (
        "GLM",
        "<tool_call>f<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>",
        "",
        {0: ("f", '{"n": 7}')},
    ),
    ("Llama 3", '{"name": "f", "parameters": {"a": 1}}', "", {0: ("f", '{"a": 1}')}),
    (
        "Llama 3",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; '
        '{"name": "g", "parameters": {}}',
        "",
        {0: ("f", "{}"), 1: ("g", "{}")},
    ),
    *(
        ("Llama 3", call, "", {0: ("f", '{"a": 1}')})
        for call in (
            '{{"name": "f", "parameters": {"a": 1}}}',
            '{"name": "f", "parameters": {{"a": 1}}}',
        )
    ),
    ("Llama 3", 'It is {"name": 1}', 'It is {"name": 1}', {}),
    ("Llama 3", '{"answer": 42}', '{"answer": 42}', {}),
    (
        "Mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    ("Mistral", '[{"name": "f", "arguments": {"a": 1}}]', "", {0: ("f", '{"a": 1}')}),
    ("Mistral", "[1, 2] is a list", "[1, 2] is a list", {}),
    (
        "Mistral with [ARGS]",
        'Yes.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "Yes.",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (
        "Mistral with [CALL_ID]",
        '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}',
        "",
        {0: ("f", '{"a": 1}')},
    ),
    (
        "DeepSeek V3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        {0: ("f", '{"a": "```"}'), 1: ("g", "{}")},
    ),
    (
        "DeepSeek V3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (
        "Kimi K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>A call of f.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        {0: ("f", '{"a": 1}')},
    ),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
        "<|channel|>commentary json<|message|>{}<|call|>",
        "I look.",
        {0: ("f", "{}")},
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 4.<|return|>",
        "It is 4.",
        {},
    ),
    (
        "FunctionGemma",
        '<start_function_call>call:f{a:<escape>it\'s {a: 1}, "b"<escape>,n:7,'
        "list:[<escape>x<escape>]}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call>",
        "",
        {0: ("f", '{"a": "it\'s {a: 1}, \\"b\\"", "n": 7, "list": ["x"]}'), 1: ("g", "{}")},
    ),
    (
        "Gemma 4",
        '<|tool_call>call:f{a:<|"|>x<|"|>,o:{k:true,l:<|"|>y<|"|>}}<tool_call|>',
        "",
        {0: ("f", '{"a": "x", "o": {"k": true, "l": "y"}}')},
    ),
    ("Gemma 4", "<|tool_call>call:f{a:<tool_call|> no", "<|tool_call>call:f{a:<tool_call|> no", {}),
]
# The line of a chat template that shows a call.
TEMPLATES = {
    "Hermes and Qwen": '<tool_call>\n{"name": <function-name>}\n</tool_call> {"parameters": {}}',
    "Qwen3-Coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>\n{{ value }}",
    "GLM": "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}",
    "Llama 3": 'Respond in the format {"name": function name, "parameters": dictionary}',
    "Mistral": '{{ "[TOOL_CALLS][" }}{% for call in calls %}{{ call | tojson }}',
    "Mistral with [ARGS]": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "Mistral with [CALL_ID]": "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}",
    "DeepSeek V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>\n```json",
    "DeepSeek V3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="{{ name }}">\n<parameter name="{{ key }}">',
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}",
    "gpt-oss": "<|start|>assistant to={{ 'functions.' + name }}<|channel|>commentary json",
    "FunctionGemma": "<start_function_call>call:{{ name }}{",
    "Gemma 4": "<|tool_call>call:{{ name }}{ <tool_call|>",
}
# Parts of a call that vocabularies have as tokens of their own: tags, and words in brackets.
SPECIAL_TOKENS = {
    "Hermes and Qwen": ("<tool_call>", "</tool_call>"),
    "GLM": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>"),
    "Mistral": ("[TOOL_CALLS]",),
    "Mistral with [ARGS]": ("[TOOL_CALLS]", "[ARGS]"),
    "DeepSeek V3": ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "gpt-oss": ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|call|>"),
    "FunctionGemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}
