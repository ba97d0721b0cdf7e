"""Decode by transformers' own `generate`, on the unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from skipsearch.core.machine import synchronize
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter

# Options of `generate` by system name; all decode greedily.
GENERATE_VARIANTS: dict[str, dict[str, Any]] = {
    "hf-generate": {},  # the default: a dynamic cache
    # transformers compiles decoding with a static cache on its own
    "hf-compile": {"cache_implementation": "static"},
    "hf-early-exit": {"assistant_early_exit": None},  # drafts with the first half of the layers
    "hf-lookup": {"prompt_lookup_num_tokens": 10},  # drafts by n-gram look-up in the prompt
}


class _FirstTokenTimer:
    """A streamer that records when the first token is generated.

    `generate` calls `put` with the prompt before the first token.
    """

    def __init__(self, device: torch.device):
        self.device, self.n_calls, self.first_token_at = device, 0, 0.0

    def put(self, value: Any) -> None:
        self.n_calls += 1
        if self.n_calls == 2:
            synchronize(self.device)
            self.first_token_at = perf_counter()

    def end(self) -> None:
        pass


class HFGenerate:
    """Greedy decoding by transformers' `generate`, with the options of one of `GENERATE_VARIANTS`.

    Raises: DecodeError if the model cannot run this variant.
    """

    def __init__(self, name: str, model: ModelAdapter):
        hf_model = getattr(model, "model", None)
        if hf_model is None:
            raise DecodeError(
                f"{model.spec.id} is not held as a Hugging Face model, so {name} cannot take part"
            )
        if name == "hf-compile" and model.spec.device.type != "cuda":
            raise DecodeError(
                "the system hf-compile cannot take part on a CPU: transformers compiles "
                "static-cache decoding on GPUs only"
            )
        self.model, self.device = hf_model, model.spec.device
        # Decoding must continue after an end-of-sequence token, as it does in the other systems.
        # `min_new_tokens` would forbid that token, and None would be replaced by the model's own
        # id. So the id is one that no token has.
        self.config = copy.deepcopy(hf_model.generation_config)
        self.config.update(eos_token_id=model.spec.vocab_size, do_sample=False, num_beams=1)
        options = dict(GENERATE_VARIANTS[name])
        if "assistant_early_exit" in options:
            options["assistant_early_exit"] = max(1, model.spec.n_layers // 2)
        self.config.update(**options)

    @torch.no_grad()
    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float, float]:
        """Generate `new_tokens` tokens.

        Returns (tokens, seconds to the first token, seconds of the other tokens).
        """
        ids = torch.tensor([list(prompt)], device=self.device)
        clock = _FirstTokenTimer(self.device)
        self.config.max_new_tokens = new_tokens
        synchronize(self.device)
        started = perf_counter()
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self.config, streamer=clock
        )
        synchronize(self.device)
        ended = perf_counter()
        return (
            out[0, ids.shape[1] :].tolist(),
            clock.first_token_at - started,
            ended - clock.first_token_at,
        )
