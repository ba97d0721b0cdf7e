"""`generate`: a drop-in for `model.generate` of a Hugging Face model that is already in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding.batch import Batch
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.prefix_cache import CacheSource
from skipsearch.decoding.processed import ProcessedAcceptance
from skipsearch.decoding.request import Request
from skipsearch.decoding.tracing import Trace
from skipsearch.decoding.validation import short_repr
from skipsearch.errors import DecodeError, ModelError, UnsupportedRequest
from skipsearch.integrations.decoder_cache import get_cached_decoder, release_kv
from skipsearch.integrations.hf_processors import (
    OWN_WARPERS,
    build_processors,
    build_stopping_criteria,
)
from skipsearch.integrations.hf_prompts import PaddedPrompt, parse_prompts, parse_token_ids
from skipsearch.integrations.hf_settings import (
    compute_max_new_tokens,
    merge_settings,
    parse_num_return_sequences,
    parse_sampling,
)
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.loader import inspect_model
from skipsearch.profile import Profile


def generate(
    model: nn.Module,
    input_ids: Any = None,
    profile: Profile | Recipe | SkipMask | None = None,
    *,
    inputs: Any = None,
    generation_config: Any = None,
    stopping_criteria: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    seed: int | None = None,
    fallback: bool = False,
    exact: bool = False,
    draft_model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    """Generate as `model.generate` does, with drafting as `profile` says. Returns prompts and
    continuations, [B, T + new].

    input_ids: [B, T], [T], or a list; `inputs` is another name for it. `generate(model,
        **tokenizer(text, return_tensors="pt"))` works. The prompts of a batch, padded on the left,
        are decoded in one batch; each gets the same tokens as alone.
    generation_config: overrides the model's own; keyword arguments override its fields
        (max_new_tokens, do_sample, repetition_penalty, …).
    logits_processor, prefix_allowed_tokens_fn: called once for each emitted token, in order.
    stopping_criteria: called after each token with the tokens so far, and with the scores so far if
        output_scores is set.
    streamer: gets the prompt, then each token.
    tokenizer: needed for stop_strings.
    seed: of sampling; if None, it is drawn from torch's global generator, so that
        `torch.manual_seed` repeats a call.
    return_dict_in_generate: return an output with sequences, and with scores and logits if they are
        asked for, but without the cache.
    fallback: pass what this decoder does not support to `model.generate`, which then drafts
        nothing.
    exact: greedy tokens are the same to the bit with any profile and with none, in every dtype.
        Every pass then has eight rows.
    draft_model: the draft model of the profile, in memory on the same device. None: one that the
        profile names is loaded.

    A pass over several rows rounds differently from a pass over one row. In float32, greedy tokens
    are those of `model.generate` in practice. In 16 bits, they may differ at near-ties, where the
    two best logits differ by a unit in the last place. They may do so with `exact`, too.

    Each argument of `model.generate` is supported, or has no effect, or is refused by name; none
    that would change tokens is ignored.

    Raises: DecodeError for invalid settings, UnsupportedRequest for those that only transformers
        supports; ModelError, ProfileError, MaskError.
    """
    if hasattr(model, "spec"):
        raise ModelError(
            f"the model is a {type(model).__name__} of skipsearch: use skipsearch.Decoder(model, "
            "profile).generate, or give "
            "the Hugging Face model itself"
        )
    try:
        return _generate_with_decoder(
            model,
            input_ids,
            profile,
            inputs,
            generation_config,
            stopping_criteria,
            streamer,
            tokenizer,
            seed,
            exact,
            draft_model,
            settings,
        )
    except UnsupportedRequest:
        if not fallback:
            raise
    named = {
        "inputs": input_ids if inputs is None else inputs,
        "generation_config": generation_config,
        "stopping_criteria": stopping_criteria,
        "streamer": streamer,
        "tokenizer": tokenizer,
    }
    # The class still has transformers' `generate` if `attach` has replaced the model's own.
    model_class: Any = type(model)
    return model_class.generate(
        model, **{name: value for name, value in named.items() if value is not None}, **settings
    )


@dataclass
class _Continuation:
    """One continuation.

    ids: [1, T + new].
    scores, logits: [1, V] for each new token; None if they were not asked for.
    """

    ids: Tensor
    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None


@dataclass
class _GenerateCall:
    """What all prompts of a call have in common.

    adapter: the decoder's model with the end-of-sequence tokens of this call.
    """

    model: Any
    decoder: Decoder
    adapter: ModelAdapter
    settings: Mapping[str, Any]
    criteria: Any
    streamer: Any
    max_new_tokens: int
    batch_size: int

    def run_all(self, prompts: list[PaddedPrompt], seeds: list[int]) -> list[_Continuation]:
        """Return the continuation of each prompt; common beginnings are computed once."""
        if len(prompts) == 1:
            return [self.run_one(prompts[0], 0, seeds[0], None)]
        # Sampled requests draft as they would alone, and so get the same samples by their seeds.
        plain_from = (
            self.decoder.plain_from_batch if parse_sampling(self.settings).is_greedy else None
        )
        with closing(Batch(self.decoder.loop, len(prompts), plain_from)) as batch:
            rows = [
                batch.start_work(
                    partial(
                        self.run_one,
                        prompt,
                        number,
                        seed,
                        batch.make_cache_source(tenant="caller"),
                        batch.make_trace(),
                    )
                )
                for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]
            while batch.running:
                batch.run_round()
                failed = next((row.error for row in rows if row.error is not None), None)
                if failed is not None:
                    raise failed
        return [row.result for row in rows]

    def run_one(
        self,
        prompt: PaddedPrompt,
        index: int,
        seed: int,
        cache_source: CacheSource | None,
        trace: Trace | None = None,
    ) -> _Continuation:
        """Return the continuation of one prompt."""
        returns_dict = bool(self.settings.get("return_dict_in_generate"))
        scores, logits = (
            returns_dict and bool(self.settings.get(f"output_{name}"))
            for name in ("scores", "logits")
        )
        attention_mask = torch.ones_like(prompt.ids)
        attention_mask[:, : prompt.padding] = 0
        processors = build_processors(
            self.model, self.settings, prompt.ids, attention_mask, self.max_new_tokens, index
        )
        sampling = parse_sampling(self.settings)
        prepared = Request(
            prompt.visible_ids,
            self.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
        ).prepare(self.adapter)
        if self.streamer is not None:
            self.streamer.put(prompt.ids.cpu())
        ids = torch.cat([prompt.ids, prompt.ids.new_zeros(1, self.max_new_tokens)], dim=1)
        length = prompt.ids.shape[1]
        acceptance = None
        if (
            scores
            or logits
            or not {type(processor).__name__ for processor in processors} <= OWN_WARPERS
        ):
            prepared.processed_acceptance = acceptance = ProcessedAcceptance(
                processors,
                prompt.ids,
                self.max_new_tokens,
                not sampling.is_greedy,
                self._on_token,
                scores,
                logits,
            )
        with closing(self.decoder.loop.stream(prepared, cache_source, trace)) as stream:  # type: ignore[type-var]
            for token in (token for chunk in stream for token in chunk.tokens):
                ids[0, length] = token
                length += 1
                if (
                    self._on_token(ids[:, :length], None)
                    if acceptance is None
                    else acceptance.ended and length == acceptance.ids.shape[1]
                ):
                    break
        return _Continuation(
            ids[:, :length].clone(),
            *((acceptance.scores, acceptance.logits) if acceptance is not None else ()),
        )

    def _on_token(self, ids: Tensor, scores: list[Tensor] | None) -> bool:
        """Pass a token to the streamer. Returns whether a stopping criterion ends the text."""
        if self.streamer is not None:
            self.streamer.put(ids[0, -1:].cpu())
        return bool(self.criteria) and bool(
            self.criteria(ids, None if scores is None else tuple(scores)).all()
        )


def _generate_with_decoder(
    model: Any,
    input_ids: Any,
    profile: Any,
    inputs: Any,
    generation_config: Any,
    stopping_criteria: Any,
    streamer: Any,
    tokenizer: Any,
    seed: int | None,
    exact: bool,
    draft_model: nn.Module | None,
    settings: Mapping[str, Any],
) -> Any:
    """Run a call with a cached decoder."""
    _, spec = inspect_model(model)  # refuses an unsupported model before settings are checked
    merged = merge_settings(model, generation_config, settings)
    is_sampled = not parse_sampling(merged).is_greedy
    decoder = get_cached_decoder(model, spec, profile, is_sampled, exact, draft_model)
    try:
        return _run_call(
            model, decoder, merged, input_ids, inputs, stopping_criteria, streamer, tokenizer, seed
        )
    finally:
        release_kv(decoder)


def _run_call(
    model: Any,
    decoder: Decoder,
    settings: Mapping[str, Any],
    input_ids: Any,
    inputs: Any,
    stopping_criteria: Any,
    streamer: Any,
    tokenizer: Any,
    seed: int | None,
) -> Any:
    """Parse all arguments of a call, decode its prompts, and return the output."""
    adapter = copy.copy(decoder.model)  # other calls may have other end-of-sequence tokens
    adapter.spec = replace(
        adapter.spec, eos_token_ids=parse_token_ids("eos_token_id", settings.get("eos_token_id"))
    )
    prompts = parse_prompts(model, adapter.spec.device, input_ids, inputs, settings)
    length = prompts[0].ids.shape[1]
    new = compute_max_new_tokens(
        settings, length, getattr(model.config, "max_position_embeddings", None)
    )
    for prompt in prompts:
        capacity = (
            None
            if adapter.spec.context_length is None
            else adapter.spec.context_length - (length - prompt.padding)
        )
        if capacity is not None and 0 < capacity < new:
            raise UnsupportedRequest(
                f"{new} tokens more were asked for, and after this prompt there is room for "
                f"{capacity} in the context that the model was made for, "
                f"{adapter.spec.context_length}: pass max_new_tokens={capacity}, "
                "or call model.generate"
            )
    sampling, count = parse_sampling(settings), parse_num_return_sequences(settings)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise DecodeError(
            f"streamer is {short_repr(streamer)}; give an object with `put` and `end`, such as a "
            "transformers.TextStreamer"
        )
    criteria = build_stopping_criteria(settings, stopping_criteria, tokenizer)
    rows = [prompt for prompt in prompts for _ in range(count)]
    if len(rows) > 1:
        _refuse_batch_callbacks(
            len(rows), settings, stopping_criteria, criteria, streamer, adapter.spec.eos_token_ids
        )
    if seed is None:
        seed = 0 if sampling.is_greedy else int(torch.randint(2**63 - 1, (1,)))
    call = _GenerateCall(model, decoder, adapter, settings, criteria, streamer, new, len(rows))
    if not isinstance(seed, int) or isinstance(seed, bool):
        Request([0], seed=seed).prepare(adapter)  # refuses it
    done = call.run_all(rows, [seed, *((seed + i) % 2**63 for i in range(1, len(rows)))])
    if streamer is not None:
        streamer.end()
    sequences = _pad_and_stack([row.ids for row in done], settings)
    if not settings.get("return_dict_in_generate"):
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    scores, logits = (
        None if values is None else tuple(values) for values in (done[0].scores, done[0].logits)
    )
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


def _refuse_batch_callbacks(
    n_sequences: int,
    settings: Mapping[str, Any],
    stopping_criteria: Any,
    criteria: Any,
    streamer: Any,
    eos: tuple[int, ...],
) -> None:
    """Refuse callbacks for more than one sequence.

    Each sequence accepts drafts and ends on its own here, but transformers calls these for all
    sequences at once.

    Raises: DecodeError, UnsupportedRequest.
    """
    if streamer is not None:
        raise DecodeError(
            f"streamer is given, and {n_sequences} sequences are to be written: a streamer takes "
            "one"
        )
    callbacks = {
        "logits_processor": settings.get("logits_processor"),
        "stopping_criteria": stopping_criteria,
        "output_scores": settings.get("output_scores"),
        "output_logits": settings.get("output_logits"),
    }
    name = next((name for name, value in callbacks.items() if value), None)
    if name is None and len(criteria) and not eos:
        # transformers continues a sequence that has stopped
        name = "stop_strings or max_time without an eos_token_id"
    if name is not None:
        raise UnsupportedRequest(
            f"{name} is given, and {n_sequences} sequences are to be written, each of which is "
            "processed for itself here: pass "
            "one sequence at a time, or fallback=True for transformers' own generate"
        )


def _pad_and_stack(rows: list[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Stack sequences into [B, longest].

    Shorter ones are right-padded with the pad token, as transformers pads finished sequences.
    """
    longest = max(row.shape[1] for row in rows)
    pad = (
        *parse_token_ids("pad_token_id", settings.get("pad_token_id")),
        *parse_token_ids("eos_token_id", settings.get("eos_token_id")),
        0,
    )[0]
    return torch.cat(
        [nn.functional.pad(row, (0, longest - row.shape[1]), value=pad) for row in rows]
    )
