"""A process that serves a tiny chat model, which drafts well but not perfectly.

    python tiny_server.py PORT_FILE [together] [FIELD=NUMBER…]

FIELD: of `Limits`; `files`: how many the process may open; `positions`: the model's context length.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.tiny import LAYERS, tiny_llama

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models import ModelAdapter, adapt
from skipsearch.serve.limits import Limits
from skipsearch.serve.server import run_server

LIMITS = Limits(
    max_num_seqs=4,
    max_queue=24,
    max_body_bytes=100_000,
    # A busy machine takes its time. Tests of these two limits have servers of their own.
    request_timeout_s=600,
    body_timeout_s=600,
    prefix_cache_size=8,
)
RECIPE = Recipe(
    (
        Lookup(min_match=2, draft_length=4),
        Skip.from_mask(SkipMask(LAYERS, (1, 3), (2,)), 4, make_exit("fixed")),
    )
)


def model(positions: int = 512) -> ModelAdapter:
    return adapt(tiny_llama(context=positions), letter_tokenizer(CHAT_TEMPLATE))


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = (word.partition("=") for word in sys.argv[2:])
    fields = {
        name: float(number) if "." in number else int(number) for name, _, number in words if number
    }
    if files := int(fields.pop("files", 0)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    positions = int(fields.pop("positions", 512))
    limits = replace(LIMITS, batch_passes="together" in sys.argv, **fields)
    run_server(
        Decoder(model(positions), RECIPE),
        "127.0.0.1",
        0,
        limits,
        "tiny",
        on_ready=lambda address: Path(sys.argv[1]).write_text(address) and None,
    )
