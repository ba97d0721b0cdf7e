"""Render chat templates in a separate process, which can be stopped.

Chat templates are programs (Jinja) that come with a model. Jinja's sandbox denies access to files
and modules, but a template may loop forever or fill the memory. This cannot be decided from its
text, and a thread cannot be stopped. One process serves all prompts and templates. It takes about a
second to start, and less than a millisecond per prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from skipsearch.errors import ModelError

RENDER_TIMEOUT_S = 5.0  # for one prompt; real templates take milliseconds
START_TIMEOUT_S = 120.0
# Variables of templates whose values are the program's own.
OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "eos_token",
        "messages",
        "pad_token",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
        "unk_token",
    }
)
CHILD_SCRIPT = Path(__file__).with_name("template_sandbox_child.py")


class TemplateRenderer:
    """A process that renders templates.

    It starts with the first prompt, restarts after a stop, and ends with this object.
    """

    def __init__(self, timeout_s: float = RENDER_TIMEOUT_S):
        self.timeout_s = timeout_s
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # whether the process has answered

    def prepare(self) -> None:
        """Start the process, which takes about a second, and do not wait for it."""
        with self._lock:
            if self._process is None:
                self._process = self._start_process()

    def render(
        self,
        template: str,
        special_tokens: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation, up to the beginning of the model's answer.

        special_tokens: by name. messages: role and content of each turn. tools: JSON schemas of
        functions that the model may call; None: tools are not mentioned. variables: others that
        the template may read, as plain data for JSON.

        Raises: ValueError with the template's message if it fails; TimeoutError if the process was
        stopped; ModelError if the process does not start."""
        request = {
            "template": template,
            "variables": {**(variables or {}), **special_tokens},
            "messages": [dict(turn) for turn in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "seconds": self.timeout_s,
        }
        with self._lock:
            process = (
                self._process
                if self._process is not None and self._process.poll() is None
                else self._start_process()
            )
            self._wait_until_ready(process)
            # Restored only after the answer was read. After an interrupt, the next request then
            # starts a new process instead of reading the answer to this one.
            self._process = None
            answer = _request(
                process, json.dumps(request, default=str).encode() + b"\n", self.timeout_s
            )
            if answer is not None:
                self._process = process
        if answer is None:
            _stop_process(process)
            raise TimeoutError(
                f"takes more than {self.timeout_s:g} seconds for one request, or more memory than "
                "there is"
            )
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def _start_process(self) -> subprocess.Popen[bytes]:
        # -P keeps the script's folder out of the module path, because our modules in it may have
        # the names of other packages.
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _stop_process, process)
        self._is_ready = False
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the first answer of a process. Raises: ModelError if it does not start."""
        if not self._is_ready and _request(process, b"", START_TIMEOUT_S) is None:
            raise ModelError(
                f"the process that renders chat templates does not start: try `{sys.executable} -P "
                f"{CHILD_SCRIPT}`"
            )
        self._is_ready = True


def get_renderer() -> TemplateRenderer:
    """Return the renderer of this process. A forked process gets a new one."""
    return _make_renderer(os.getpid())


@lru_cache(maxsize=1)
def _make_renderer(pid: int) -> TemplateRenderer:
    return TemplateRenderer()


def _request(
    process: subprocess.Popen[bytes], request: bytes, timeout_s: float
) -> dict[str, Any] | None:
    """Send a request; return the answer, or None if the process died or was stopped."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = Timer(timeout_s, process.kill)
    timer.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        line = process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None
    except OSError:  # the process died while the request was written
        return None
    finally:
        timer.cancel()


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unwritten data, but the reader is gone
                continue
