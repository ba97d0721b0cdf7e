"""`generate`: a drop-in for `model.generate` of a Hugging Face model that is already in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.decoding.decoder import Decoder
from skipsearch.errors import DecodeError
from skipsearch.mask import SkipMask
from skipsearch.models import adapt
from skipsearch.profile import Profile

# What a generation config may ask for beside these would change the tokens, so it is refused rather than ignored.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "num_return_sequences": (None, 1), "repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0), "min_new_tokens": (None, 0), "bad_words_ids": (None,), "typical_p": (None, 1.0), "min_p": (None,),
    "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "suppress_tokens": (None,), "begin_suppress_tokens": (None,), "guidance_scale": (None, 1.0), "penalty_alpha": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0), "sequence_bias": (None,), "watermarking_config": (None,), "constraints": (None,),
    "force_words_ids": (None,), "prompt_lookup_num_tokens": (None,), "max_time": (None,),
}


def generate(model: nn.Module, input_ids: Tensor, profile: Profile | SkipMask | None = None, generation_config: Any = None,
             streamer: Any = None, tokenizer: Any = None, seed: int = 0, **overrides: Any) -> Tensor:
    """[1, T] prompt -> [1, T + new] prompt and continuation, as `model.generate` returns it, drafted as `profile` says.

    generation_config: the model's own if None; keyword arguments override its fields (max_new_tokens, do_sample, …).
    streamer: gets the prompt, then each round's tokens. tokenizer: needed for stop strings.
    Raises: DecodeError for more than one sequence, or a setting that this decoder does not carry out; ProfileError, MaskError.
    """
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise DecodeError(f"input_ids has shape {tuple(input_ids.shape)}; one sequence, [1, T], is decoded at a time")
    config: Any = generation_config if generation_config is not None else model.generation_config
    settings = {**config.to_dict(), **overrides}
    unknown = [name for name, neutral in _NEUTRAL.items() if settings.get(name) not in neutral]
    if unknown:
        raise DecodeError(f"{unknown[0]} is {settings[unknown[0]]!r}, which this decoder does not carry out: "
                          "leave it out, or use model.generate")
    sampled = bool(settings.get("do_sample"))
    new = settings.get("max_new_tokens") or ((settings.get("max_length") or 20) - input_ids.shape[1])
    adapter = adapt(model, tokenizer)
    eos = settings.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    adapter.spec = replace(adapter.spec, eos_token_ids=eos_ids)
    decoder = Decoder(adapter, profile)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    tokens: list[int] = []
    for chunk in decoder.stream(input_ids, max_new_tokens=new, temperature=(settings.get("temperature") or 1.0) if sampled else 0.0,
                                top_p=(settings.get("top_p") or 1.0) if sampled else 1.0,
                                top_k=_top_k(settings.get("top_k")) if sampled else 0, seed=seed, stop=settings.get("stop_strings")):
        tokens += chunk.tokens
        if streamer is not None:
            streamer.put(torch.tensor(chunk.tokens))
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)


def _top_k(value: int | None) -> int:
    """transformers samples from 50 tokens where a config is silent."""
    return 50 if value is None else value
