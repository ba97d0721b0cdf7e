"""SECURITY.md names every limit of what a client may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from skipsearch.decoding.stopping import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from skipsearch.models.chat import template_sandbox, template_sandbox_child
from skipsearch.serve.limits import Limits
from skipsearch.serve.protocol import MAX_ANSWERS, MOST_BIASES
from skipsearch.serve.server import MAX_HEADER_BYTES
from skipsearch.serve.tools import MAX_TOOLS

PAGE = (Path(__file__).parents[2] / "SECURITY.md").read_text("utf-8")
ROWS = {
    line.split("|")[1].strip(): line.split("|")[2].strip()
    for line in PAGE.splitlines()
    if line.startswith("| ")
}
LIMITS = Limits()


@pytest.mark.parametrize(
    ("what", "bound"),
    [
        (
            "connections that are open",
            f"{LIMITS.connections}, fewer if the limit of open files is low",
        ),
        ("head of a request", f"{MAX_HEADER_BYTES:,} bytes, {LIMITS.head_s:g} s"),
        ("body of a request", f"{LIMITS.max_body_bytes:,} bytes, {LIMITS.body_timeout_s:g} s"),
        ("pause between two requests of a connection", f"{LIMITS.idle_s:g} s"),
        ("time without reading any of an answer", f"{LIMITS.unread_s:g} s"),
        ("requests decoded at a time (`--max-num-seqs`)", f"{LIMITS.max_num_seqs}"),
        ("requests that wait (`--max-queue`)", f"{LIMITS.max_queue}"),
        (
            "tokens of a prompt that a round reads, except with `--batch-passes`, recurrent layers "
            "and drafts that observe the prompt",
            f"{LIMITS.prompt_rows}",
        ),
        (
            "decoding of one request (`--request-timeout`)",
            f"{LIMITS.request_timeout_s:g} s, also within a round",
        ),
        ("answers of one request (prompts times `n`)", f"{MAX_ANSWERS}"),
        ("stop strings", f"{MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS:,} characters"),
        ("tokens in `logit_bias`", f"{MOST_BIASES:,}"),
        ("tools", f"{MAX_TOOLS}"),
        (
            "rendering of a chat template",
            f"{template_sandbox.RENDER_TIMEOUT_S:g} s, "
            f"{template_sandbox_child.MAX_EXTRA_BYTES >> 30} GiB, "
            f"{template_sandbox_child.MAX_REPETITIONS} characters for each byte of the request and "
            f"{template_sandbox_child.MAX_ADDED_CHARS:,} more",
        ),
    ],
)
def test_the_page_has_the_bounds_of_the_server(what: str, bound: str) -> None:
    assert ROWS[what] == bound
