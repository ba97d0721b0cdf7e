"""The child process of `template_sandbox.py`.

It reads each request as a line of JSON, and answers with a line of JSON: the text or an error. It
runs as a script and imports nothing of this package, so that it starts fast and holds no valuable
data.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

MAX_EXTRA_BYTES = 1 << 30  # memory for templates, in addition to the interpreter's
# Characters of a prompt: as many as a template may add, and a multiple of those it was given.
MAX_ADDED_CHARS, MAX_REPETITIONS = 1 << 18, 4


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    limit_memory()
    write_answer(answers, {})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # End an endless template even if the parent dies before it stops this process.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 2 * request["seconds"])
        try:
            texts, _ = render_jinja_template(
                conversations=[request["messages"]],
                tools=request["tools"],
                chat_template=request["template"],
                **{"add_generation_prompt": True, **request["variables"]},
            )
            if len(texts[0]) > MAX_ADDED_CHARS + MAX_REPETITIONS * len(line):
                raise ValueError(
                    f"it makes {len(texts[0]):,} characters of a request of {len(line):,} bytes"
                )
            result = {"text": texts[0]}
        except Exception as error:  # from Jinja, Python, or the template's raise_exception
            result = {"error": str(error)[:1000] or type(error).__name__}
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        write_answer(answers, result)


def write_answer(answers: Any, result: dict[str, Any]) -> None:
    answers.write(json.dumps(result) + "\n")
    answers.flush()


def limit_memory() -> None:
    """Limit the memory of templates, if the platform can. Beyond it, they get a MemoryError."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MAX_EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
