"""Logits processors and stopping criteria of a `generate` call.

transformers itself builds them from the settings, in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from skipsearch.decoding.stopping import parse_stop_strings
from skipsearch.decoding.validation import short_repr
from skipsearch.engine.sampler import is_integral, is_real
from skipsearch.errors import DecodeError
from skipsearch.integrations.hf_settings import PROCESSOR_SETTINGS

# Our own sampling does the same to logits, also when it draws drafts.
OWN_WARPERS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}


def build_processors(
    model: Any,
    call_settings: Mapping[str, Any],
    ids: Tensor,
    attention_mask: Tensor,
    max_new_tokens: int,
    batch_index: int,
) -> list[Any]:
    """Return the processors in the order in which transformers calls them; with do_sample the
    warpers come last.

    ids: [1, T], the prompt, padding included; attention_mask: its attention mask.
    max_new_tokens: the most tokens that may follow.
    batch_index: index of the prompt in the batch, which prefix_allowed_tokens_fn gets.

    Raises: DecodeError for settings that transformers refuses.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    given = call_settings.get("logits_processor")
    given = [] if given is None else given
    if not isinstance(given, list | tuple) or not all(callable(processor) for processor in given):
        raise DecodeError(
            f"logits_processor is {short_repr(given)}; give a transformers.LogitsProcessorList or "
            "a list of processors"
        )
    allowed = call_settings.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise DecodeError(
            f"prefix_allowed_tokens_fn is {short_repr(allowed)}; give a function of (row of the "
            "batch, token ids)"
        )
    sampled = ("temperature", "top_k", "top_p") if call_settings.get("do_sample") else ()
    names = [
        *PROCESSOR_SETTINGS,
        *sampled,
        "do_sample",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
    ]
    settings = {name: call_settings[name] for name in names if call_settings.get(name) is not None}
    if call_settings.get("min_new_tokens") is not None:
        settings["min_length"] = (
            call_settings["min_new_tokens"] + ids.shape[1]
            if is_integral(call_settings["min_new_tokens"])
            else 0
        )  # as transformers does
    try:
        config = GenerationConfig(**settings)
        config.max_length, config.num_beams = ids.shape[1] + max_new_tokens, 1
        model._prepare_special_tokens(config, True, device=ids.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=None
            if allowed is None
            else lambda _, tokens: allowed(batch_index, tokens),
            logits_processor=LogitsProcessorList(given),
            device=ids.device,
            model_kwargs={"attention_mask": attention_mask},
        )
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RuntimeError,
    ) as error:  # each processor checks its own settings
        message = " ".join(str(error).split())[:300]
        raise DecodeError(
            f"transformers refuses these settings: {message or type(error).__name__}"
        ) from None
    return list(processors)


def build_stopping_criteria(
    settings: Mapping[str, Any], custom_criteria: Any, tokenizer: Any
) -> Any:
    """Return transformers' stopping criteria, which are called for each token.

    If a setting would add a criterion of a type, and the caller passes one of the same type, only
    the caller's is used.

    Raises: DecodeError.
    """
    from transformers import (
        EosTokenCriteria,
        MaxLengthCriteria,
        MaxTimeCriteria,
        StoppingCriteriaList,
        StopStringCriteria,
    )

    custom_criteria = [] if custom_criteria is None else custom_criteria
    if not isinstance(custom_criteria, list | tuple) or not all(
        callable(c) for c in custom_criteria
    ):
        raise DecodeError(
            f"stopping_criteria is {short_repr(custom_criteria)}; give a "
            "transformers.StoppingCriteriaList or a list of criteria"
        )
    types = {type(criterion) for criterion in custom_criteria}
    for kind, setting in ((MaxLengthCriteria, "max_length"), (EosTokenCriteria, "eos_token_id")):
        if kind in types:  # it would replace the limit at which the decoder itself ends
            raise DecodeError(
                f"stopping_criteria holds a {kind.__name__}, which this decoder does not carry "
                f"out: pass {setting} instead"
            )
    criteria = StoppingCriteriaList()
    max_time = settings.get("max_time")
    if max_time is not None and not is_real(max_time):
        raise DecodeError(f"max_time is {short_repr(max_time)}; it is a number of seconds")
    if max_time is not None and MaxTimeCriteria not in types:
        criteria.append(MaxTimeCriteria(max_time=max_time))
    strings = parse_stop_strings(settings.get("stop_strings"), "stop_strings")
    if strings and tokenizer is None:
        raise DecodeError("stop_strings need the model's tokenizer: pass tokenizer=…")
    if strings and not hasattr(tokenizer, "get_vocab"):
        raise DecodeError(
            f"tokenizer is {short_repr(tokenizer)}; give the model's own, as AutoTokenizer loads it"
        )
    if strings and StopStringCriteria not in types:
        try:
            criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        except ValueError as error:  # a string that no tokens of this vocabulary spell
            raise DecodeError(
                f"stop_strings is {short_repr(strings)}, and this tokenizer cannot write it: "
                f"{error}"
            ) from None
    criteria.extend(custom_criteria)
    return criteria
