"""Chat templates are programs (Jinja) that come with a model. They are rendered by a process of their own, which can be stopped.

Jinja's sandbox keeps a template from files and modules, and not from looping or filling the memory. Whether one does cannot be read off it
(a loop over the letters of a prompt inside another one is enough), nor can a thread be stopped. One process serves all prompts and
templates: it takes about a second to start, and less than a millisecond for a prompt.
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

SECONDS = 5.0         # for one prompt; real templates take milliseconds
START_SECONDS = 120.0
CHILD = Path(__file__).with_name("rendering_child.py")


class Renderer:
    """A process that renders templates. It is started by the first prompt, again after one that had to be stopped, and ends with this."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, tokens: Mapping[str, Any], messages: Sequence[Mapping[str, Any]],
               tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """A conversation, up to where the model's answer begins. tokens: the special tokens by name. messages: role and content of each
        turn. tools: JSON schemas of functions that the model may call; None where nothing is said of tools.

        Raises: ValueError with what the template says where it fails; TimeoutError if it had to be stopped; ModelError without a process.
        """
        request = {"template": template, "tokens": dict(tokens), "messages": [dict(turn) for turn in messages],
                   "tools": None if tools is None else [dict(tool) for tool in tools], "seconds": self.seconds}
        with self._lock:
            process = self._process if self._process is not None and self._process.poll() is None else self._start()
            self._process = None  # until it has answered: what breaks off in between must not leave its answer to the next request
            answer = _asked(process, json.dumps(request, default=str).encode() + b"\n", self.seconds)
            if answer is not None:
                self._process = process
        if answer is None:
            _end(process)
            raise TimeoutError(f"takes more than {self.seconds:g} seconds for one request, or more memory than there is")
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the folder of the script holds modules of ours, whose names others may have too.
        process = subprocess.Popen([sys.executable, "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, process)
        if _asked(process, b"", START_SECONDS) is None:
            raise ModelError(f"the process that renders chat templates does not start: try `{sys.executable} -P {CHILD}`")
        return process


def renderer() -> Renderer:
    """The one of this process; a fork gets its own."""
    return _renderer(os.getpid())


@lru_cache(maxsize=1)
def _renderer(pid: int) -> Renderer:
    return Renderer()


def _asked(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any] | None:
    """The next line of its answers; None if it died, or was stopped after so many seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        line = process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None
    except OSError:  # it died while it was written to
        return None
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not yet written has no reader any more
                continue
