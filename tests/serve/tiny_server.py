"""A server of a tiny chat model that drafts well but not perfectly, as a process: `python tiny_server.py PORT_FILE [together]`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.letters import CHAT, letter_tokenizer
from helpers.tiny import LAYERS, tiny_llama

from skipsearch.decoding import Decoder
from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.skip import Skip
from skipsearch.exits import make_exit
from skipsearch.mask import SkipMask
from skipsearch.models import ModelAdapter, adapt
from skipsearch.recipe import Recipe
from skipsearch.serve.limits import Limits
from skipsearch.serve.run import serve

LIMITS = Limits(running=4, waiting=24, body=100_000, seconds=60, reading=1.0, prefixes=8)
RECIPE = Recipe((Lookup(min_match=2, draft_length=4), Skip.of(SkipMask(LAYERS, (1, 3), (2,)), 4, make_exit("fixed"))))


def model() -> ModelAdapter:
    return adapt(tiny_llama(context=512), letter_tokenizer(CHAT))


if __name__ == "__main__":
    torch.set_num_threads(1)
    limits = replace(LIMITS, together="together" in sys.argv)
    serve(Decoder(model(), RECIPE), "127.0.0.1", 0, limits, "tiny", ready=lambda address: Path(sys.argv[1]).write_text(address) and None)
