"""`generate`: a drop-in for `model.generate` of a Hugging Face model that is already in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from skipsearch.decoding.arguments import shown
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.inputs import read_ids, read_prompt
from skipsearch.decoding.sampling import is_number
from skipsearch.decoding.settings import read_new_tokens, read_sampling, read_settings
from skipsearch.decoding.stopping import stop_strings
from skipsearch.errors import DecodeError, ModelError
from skipsearch.mask import SkipMask
from skipsearch.models import adapt
from skipsearch.profile import Profile
from skipsearch.recipe import Recipe


def generate(model: nn.Module, input_ids: Any = None, profile: Profile | Recipe | SkipMask | None = None, *, inputs: Any = None,
             generation_config: Any = None, stopping_criteria: Any = None, streamer: Any = None, tokenizer: Any = None,
             seed: int | None = None, **settings: Any) -> Any:
    """[1, T] prompt -> [1, T + new] prompt and continuation, as `model.generate` returns it, drafted as `profile` says.

    input_ids: [1, T], [T], or a list; `inputs` is another name for it. `generate(model, **tokenizer(text, return_tensors="pt"))` works.
    generation_config: over the model's own; keyword arguments override its fields (max_new_tokens, do_sample, …).
    stopping_criteria: called after each token with the tokens so far and no scores. streamer: gets the prompt, then each token.
    tokenizer: needed for stop_strings. seed: of sampling; drawn from torch's global generator if None, so that `torch.manual_seed`
    repeats a call. return_dict_in_generate returns an output with `sequences` alone: the cache is not handed out.

    Whatever `model.generate` takes is carried out, or has no effect, or is refused by name; nothing that would change tokens is ignored.
    Raises: DecodeError for more than one sequence, or a setting that this decoder does not carry out; ModelError, ProfileError, MaskError.
    """
    if hasattr(model, "spec"):
        raise ModelError(f"the model is a {type(model).__name__} of skipsearch: use skipsearch.Decoder(model, profile).generate, or give "
                         "the Hugging Face model itself")
    adapter = adapt(model)
    asked = read_settings(model, generation_config, settings)
    prompt = read_prompt(model, adapter.spec.device, input_ids, inputs, asked)
    length = prompt.ids.shape[1]
    new = read_new_tokens(asked, length, getattr(model.config, "max_position_embeddings", None))
    room = None if adapter.spec.context is None else adapter.spec.context - (length - prompt.padding)
    if room is not None and 0 < room < new:
        raise DecodeError(f"{new} tokens more were asked for, and after this prompt there is room for {room} in the context that the "
                          f"model was made for, {adapter.spec.context}: pass max_new_tokens={room}, or call model.generate")
    sampling = read_sampling(asked)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise DecodeError(f"streamer is {shown(streamer)}; give an object with `put` and `end`, such as a transformers.TextStreamer")
    criteria = _criteria(asked, stopping_criteria, tokenizer)
    adapter.spec = replace(adapter.spec, eos_token_ids=read_ids("eos_token_id", asked.get("eos_token_id")))
    if seed is None:
        seed = 0 if sampling.greedy else int(torch.randint(2**63 - 1, (1,)))
    stream = Decoder(adapter, profile).stream(prompt.seen, new, temperature=sampling.temperature, top_p=sampling.top_p,
                                               top_k=sampling.top_k, seed=seed)

    if streamer is not None:
        streamer.put(prompt.ids.cpu())
    ids = torch.cat([prompt.ids, prompt.ids.new_zeros(1, new)], dim=1)
    for token in (token for chunk in stream for token in chunk.tokens):
        ids[0, length] = token
        length += 1
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if criteria and bool(criteria(ids[:, :length], None).all()):
            break
    if streamer is not None:
        streamer.end()
    sequences = ids[:, :length].clone()
    if not asked.get("return_dict_in_generate"):
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _criteria(asked: Mapping[str, Any], given: Any, tokenizer: Any) -> Any:
    """transformers' own criteria, judged token by token: a criterion of a type that a setting asks for too replaces that setting's."""
    from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

    given = [] if given is None else given
    if not isinstance(given, list | tuple) or not all(callable(c) for c in given):
        raise DecodeError(f"stopping_criteria is {shown(given)}; give a transformers.StoppingCriteriaList or a list of criteria")
    types = {type(criterion) for criterion in given}
    for kind, instead in ((MaxLengthCriteria, "max_length"), (EosTokenCriteria, "eos_token_id")):
        if kind in types:   # it would replace the limit that the decoder itself ends at
            raise DecodeError(f"stopping_criteria holds a {kind.__name__}, which this decoder does not carry out: pass {instead} instead")
    criteria = StoppingCriteriaList()
    max_time = asked.get("max_time")
    if max_time is not None and not is_number(max_time):
        raise DecodeError(f"max_time is {shown(max_time)}; it is a number of seconds")
    if max_time is not None and MaxTimeCriteria not in types:
        criteria.append(MaxTimeCriteria(max_time=max_time))
    strings = stop_strings(asked.get("stop_strings"), "stop_strings")
    if strings and tokenizer is None:
        raise DecodeError("stop_strings need the model's tokenizer: pass tokenizer=…")
    if strings and not hasattr(tokenizer, "get_vocab"):
        raise DecodeError(f"tokenizer is {shown(tokenizer)}; give the model's own, as AutoTokenizer loads it")
    if strings and StopStringCriteria not in types:
        try:
            criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        except ValueError as error:   # a string that no tokens of this vocabulary spell
            raise DecodeError(f"stop_strings is {shown(strings)}, and this tokenizer cannot write it: {error}") from None
    criteria.extend(given)
    return criteria
