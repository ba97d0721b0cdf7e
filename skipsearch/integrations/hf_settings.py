"""All arguments of `model.generate` and what happens to each here: supported, ignored because it
has no effect, or refused by name.

Each name is in exactly one table. A name in no table is refused, so nothing that would change
tokens is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from skipsearch.core.registry import unknown_name
from skipsearch.decoding.validation import short_repr
from skipsearch.engine.sampler import SamplingParams, is_integral, is_real
from skipsearch.errors import DecodeError, UnsupportedRequest

# transformers itself builds processors from these.
PROCESSOR_SETTINGS = frozenset(
    {
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "min_length",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "watermarking_config",
        "renormalize_logits",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
    }
)
SUPPORTED = PROCESSOR_SETTINGS | {
    "max_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "eos_token_id",
    "stop_strings",
    "max_time",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "num_return_sequences",
    "pad_token_id",
    "bos_token_id",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "tokenizer",
    "inputs",
    "input_ids",
    "attention_mask",
    "token_type_ids",
}

IGNORED = frozenset(
    {
        "early_stopping",
        "length_penalty",  # of beams
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "transformers_version",  # of static caches, of how passes run
        "decoder_start_token_id",  # of encoder-decoders
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",  # of assistants, which are refused
        "trust_remote_code",
    }
)  # of custom_generate, which is refused

# Values that have no effect. Any other value is refused.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "hybrid"),
    "cache_config": (None, {}),
    "token_healing": (None, False),
    "guidance_scale": (None, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "is_assistant": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "continuous_batching_config": (None,),
    "low_memory": (None, False),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "prefill_chunk_size": (None,),
    "synced_gpus": (None, False),
    "assistant_model": (None,),
    "assistant_tokenizer": (None,),
    "negative_prompt_ids": (None,),
    "negative_prompt_attention_mask": (None,),
    "custom_generate": (None,),
    "position_ids": (None,),
    "inputs_embeds": (None,),
    "past_key_values": (None,),
}

LOSSY_SETTING = "assistant_ensemble_weight"  # changes tokens, so there is no fallback for it
DRAFTING_SETTINGS = {
    "assistant_model",
    "assistant_tokenizer",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "speculation_type",
}
KNOWN_SETTINGS = SUPPORTED | IGNORED | NEUTRAL_VALUES.keys()
BOOLEAN_SETTINGS = (
    "do_sample",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "renormalize_logits",
    "remove_invalid_values",
)
DEFAULTS = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}  # transformers' defaults, if no config has a value
DEFAULT_NEW_TOKENS = 20


def merge_settings(
    model: Any, generation_config: Any, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a call.

    Its keywords override its generation_config, which overrides the model's own, which overrides
    transformers' defaults. As in transformers, a keyword that is None overrides, and a config's
    entry that is None does not.

    Raises: DecodeError for an unknown setting, UnsupportedRequest for an unsupported one.
    """
    from transformers import GenerationConfig

    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise DecodeError(
            f"generation_config is a {type(generation_config).__name__}, "
            f"{short_repr(generation_config)}; give a "
            "transformers.GenerationConfig, or pass its entries as keywords"
        )
    fields, inputs = vars(GenerationConfig()).keys(), signature(model.forward).parameters.keys()
    own = _config_entries(getattr(model, "generation_config", None))
    given = _config_entries(generation_config)
    for kind, names, known in (
        ("setting", keywords.keys(), KNOWN_SETTINGS | fields | inputs),
        ("entry of a generation config", given.keys(), fields | own.keys()),
    ):
        wrong = next((name for name in names if name not in known), None)
        if wrong is not None:
            raise DecodeError(
                unknown_name(kind, wrong, SUPPORTED | {"exact", "fallback", "profile", "seed"})
            )
    # transformers keeps unknown entries of a model's own config, and reads none of them.
    configured = {name: value for name, value in {**own, **given}.items() if name in fields}
    settings = {**DEFAULTS, **configured, **keywords}
    for name in BOOLEAN_SETTINGS:
        if not isinstance(settings.get(name), bool | None):
            raise DecodeError(f"{name} is {short_repr(settings[name])}; it is True or False")
    for name, value in settings.items():
        if name in NEUTRAL_VALUES or name not in KNOWN_SETTINGS:
            _refuse_unless_neutral(name, value, NEUTRAL_VALUES.get(name, (None,)))
    return settings


def parse_sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters.

    Raises: DecodeError for a value of the wrong type, with or without do_sample. With do_sample,
        also for a value out of range.
    """
    temperature, top_k, top_p = (settings.get(name) for name in ("temperature", "top_k", "top_p"))
    for name, value, right in (
        ("temperature", temperature, is_real),
        ("top_p", top_p, is_real),
        ("top_k", top_k, is_integral),
    ):
        if value is not None and not right(value):
            raise DecodeError(
                f"{name} is {short_repr(value)}; it is a "
                f"{'whole ' if right is is_integral else ''}number"
            )
    if not settings.get("do_sample"):
        return SamplingParams()
    if temperature == 0:
        raise DecodeError(
            f"temperature is {temperature} and do_sample is True; for greedy decoding pass "
            "do_sample=False"
        )
    return SamplingParams(
        1.0 if temperature is None else temperature,
        1.0 if top_p is None else top_p,
        0 if top_k is None else top_k,
    )


def compute_max_new_tokens(
    settings: Mapping[str, Any], prompt_length: int, max_positions: int | None
) -> int:
    """Return how many tokens may follow a prompt, as transformers computes it.

    prompt_length: tokens of the prompt, padding included.
    max_positions: the config's max_position_embeddings, which limits only transformers' default.

    Raises: DecodeError.
    """
    new, total = settings.get("max_new_tokens"), settings.get("max_length")
    for name, value in (("max_new_tokens", new), ("max_length", total)):
        if value is not None and (not is_integral(value) or value < 1):
            raise DecodeError(
                f"{name} is {short_repr(value)}; it is a whole number of tokens, at least 1"
            )
    if new is not None:
        return int(new)
    if total is None:
        total = (
            prompt_length + DEFAULT_NEW_TOKENS
            if max_positions is None
            else min(prompt_length + DEFAULT_NEW_TOKENS, max_positions)
        )
    if total <= prompt_length:
        raise DecodeError(
            f"the prompt has {prompt_length} tokens and max_length is {total}, the prompt "
            "included: raise it, or give "
            "max_new_tokens"
        )
    return int(total) - prompt_length


def parse_num_return_sequences(settings: Mapping[str, Any]) -> int:
    """Return the number of continuations of each prompt. Raises: DecodeError."""
    count = settings.get("num_return_sequences")
    if count is None:
        return 1
    if not is_integral(count) or count < 1:
        raise DecodeError(
            f"num_return_sequences is {short_repr(count)}; it is a whole number, at least 1"
        )
    if count > 1 and not settings.get("do_sample"):
        raise DecodeError(
            f"num_return_sequences is {count} and do_sample is not set: greedy continuations of "
            "one prompt are all the same, "
            "so sample, or leave it out"
        )
    return int(count)


def _config_entries(config: Any) -> dict[str, Any]:
    """Return the entries of a generation config that are set: not None, and not private (leading
    underscore).
    """
    entries = {} if config is None else config.to_dict()
    return {
        name: value
        for name, value in entries.items()
        if value is not None and not name.startswith("_")
    }


def _refuse_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise UnsupportedRequest, or DecodeError, for a value that has an effect."""
    if value is None or any(_is_same_value(value, n) for n in neutral):
        return
    way_out = (
        "leave it out, for the profile says how to draft"
        if name in DRAFTING_SETTINGS
        else "leave it out, or pass fallback=True for transformers' own generate"
    )
    refusal = DecodeError if name == LOSSY_SETTING else UnsupportedRequest
    raise refusal(
        f"{name} is {short_repr(value)}, which this decoder does not carry out: {way_out}"
    )


def _is_same_value(value: Any, neutral: Any) -> bool:
    """Return whether two values are equal and of one type: True is not 1, and a tensor equals
    nothing.
    """
    if isinstance(neutral, bool) or isinstance(value, bool):
        return value is neutral
    kind = (int, float) if isinstance(neutral, int | float) else type(neutral)
    return isinstance(value, kind) and bool(value == neutral)
