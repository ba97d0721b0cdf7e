"""The process behind `rendering.py`: a line of JSON in, a request; a line of JSON out, its text or what went wrong.

It is run as a script and imports nothing of this package, so that it starts fast and holds nothing worth having.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

ROOM = 1 << 30     # bytes that templates may take beside what the interpreter has
LONGEST = 1 << 26  # characters of a rendered prompt


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    limit_memory()
    answer(answers, {})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if hasattr(signal, "setitimer"):  # a template that never ends must not outlive the process that would stop it
            signal.setitimer(signal.ITIMER_REAL, 2 * request["seconds"])
        try:
            texts, _ = render_jinja_template(
                conversations=[request["messages"]], tools=request["tools"], chat_template=request["template"],
                add_generation_prompt=True, **request["tokens"])
            if len(texts[0]) > LONGEST:
                raise ValueError(f"it makes {len(texts[0])} characters of a request")
            result = {"text": texts[0]}
        except Exception as error:  # a template is a program: it fails in Jinja's ways, in Python's, and by its own raise_exception
            result = {"error": str(error)[:1000] or type(error).__name__}
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        answer(answers, result)


def answer(answers: Any, result: dict[str, Any]) -> None:
    answers.write(json.dumps(result) + "\n")
    answers.flush()


def limit_memory() -> None:
    """Where the system can: past the limit a template fails with a MemoryError."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))


if __name__ == "__main__":
    main()
