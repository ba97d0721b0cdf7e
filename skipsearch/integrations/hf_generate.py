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
    **settings: Any,
) -> Any:
    """[B, T] prompts -> [B, T + new] prompts and continuations, as `model.generate` returns them,
    drafted as `profile` says.

    input_ids: [B, T], [T], or a list; `inputs` is another name for it. `generate(model,
    **tokenizer(text, return_tensors="pt"))` works. The rows of a batch, padded on the left, are
    decoded side by side; each gets the tokens that it gets alone. generation_config: over the
    model's own; keyword arguments override its fields (max_new_tokens, do_sample,
    repetition_penalty, …). logits_processor, prefix_allowed_tokens_fn: called once for each emitted
    token, in order. stopping_criteria: called after each token with the tokens so far, and with the
    scores so far where output_scores asks for them. streamer: gets the prompt, then each token.
    tokenizer: needed for stop_strings. seed: of sampling; drawn from torch's global generator if
    None, so that `torch.manual_seed` repeats a call. return_dict_in_generate returns an output with
    sequences, and with scores and logits if they are asked for; the cache is not handed out.
    fallback: hand what this decoder does not carry out to `model.generate`, which drafts nothing
    then. exact: greedy tokens are the same to the bit with any profile and with none, in every
    dtype. Every pass then has eight rows.

    A pass over several rows rounds otherwise than one over a single row. So greedy tokens are those
    of `model.generate` in float32 in practice, and in 16 bits up to near-ties, where the two best
    logits differ by a unit in the last place. This is so with `exact` too.

    Whatever `model.generate` takes is carried out, or has no effect, or is refused by name; nothing
    that would change tokens is ignored. Raises: DecodeError for settings that make no sense,
    NotCarriedOut for those that transformers alone carries out; ModelError, ProfileError,
    MaskError."""
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
    kind: Any = type(
        model
    )  # whose generate it is also where `attach` has put ours in the model's own place
    return kind.generate(
        model, **{name: value for name, value in named.items() if value is not None}, **settings
    )


@dataclass
class _Continuation:
    """One continuation. ids: [1, T + new]. scores, logits: [1, V] for each new token, where they
    were asked for.
    """

    ids: Tensor
    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None


@dataclass
class _GenerateCall:
    """What all rows of a call have in common. adapter: the decoder's model with the end-of-sequence
    tokens of this call.
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
        """The continuation of each. What prompts begin with alike is computed once."""
        if len(prompts) == 1:
            return [self.run_one(prompts[0], 0, seeds[0], None)]
        # Sampled rows draft as they would alone, and so get the samples that their seeds get alone.
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
        """The continuation of a prompt."""
        keeps = bool(self.settings.get("return_dict_in_generate"))
        scores, logits = (
            keeps and bool(self.settings.get(f"output_{name}")) for name in ("scores", "logits")
        )
        seen = torch.ones_like(prompt.ids)
        seen[:, : prompt.padding] = 0
        processors = build_processors(
            self.model, self.settings, prompt.ids, seen, self.max_new_tokens, index
        )
        sampling = parse_sampling(self.settings)
        ready = Request(
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
        steering = None
        if (
            scores
            or logits
            or not {type(processor).__name__ for processor in processors} <= OWN_WARPERS
        ):
            ready.processed_acceptance = steering = ProcessedAcceptance(
                processors,
                prompt.ids,
                self.max_new_tokens,
                not sampling.is_greedy,
                self._on_token,
                scores,
                logits,
            )
        with closing(self.decoder.loop.stream(ready, cache_source, trace)) as stream:  # type: ignore[type-var]
            for token in (token for chunk in stream for token in chunk.tokens):
                ids[0, length] = token
                length += 1
                if (
                    self._on_token(ids[:, :length], None)
                    if steering is None
                    else steering.ended and length == steering.ids.shape[1]
                ):
                    break
        return _Continuation(
            ids[:, :length].clone(),
            *((steering.scores, steering.logits) if steering is not None else ()),
        )

    def _on_token(self, ids: Tensor, scores: list[Tensor] | None) -> bool:
        """A token is emitted: show it, and ask whether it is the last."""
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
    settings: Mapping[str, Any],
) -> Any:
    _, spec = inspect_model(
        model
    )  # a model that cannot be driven is refused before settings are read against it
    asked = merge_settings(model, generation_config, settings)
    decoder = get_cached_decoder(model, spec, profile, not parse_sampling(asked).is_greedy, exact)
    try:
        return _run_call(
            model, decoder, asked, input_ids, inputs, stopping_criteria, streamer, tokenizer, seed
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
        room = (
            None
            if adapter.spec.context_length is None
            else adapter.spec.context_length - (length - prompt.padding)
        )
        if room is not None and 0 < room < new:
            raise UnsupportedRequest(
                f"{new} tokens more were asked for, and after this prompt there is room for {room} "
                "in the context that the "
                f"model was made for, {adapter.spec.context_length}: pass max_new_tokens={room}, "
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
        None if kept is None else tuple(kept) for kept in (done[0].scores, done[0].logits)
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
    """Rows end and accept drafts each for itself, and transformers calls what it is given for all
    of them at once: refuses what could tell.

    Raises: DecodeError.
    """
    if streamer is not None:
        raise DecodeError(
            f"streamer is given, and {n_sequences} sequences are to be written: a streamer takes "
            "one"
        )
    watched = {
        "logits_processor": settings.get("logits_processor"),
        "stopping_criteria": stopping_criteria,
        "output_scores": settings.get("output_scores"),
        "output_logits": settings.get("output_logits"),
    }
    name = next((name for name, value in watched.items() if value), None)
    if name is None and len(criteria) and not eos:
        # transformers writes on in a row that has stopped
        name = "stop_strings or max_time without an eos_token_id"
    if name is not None:
        raise UnsupportedRequest(
            f"{name} is given, and {n_sequences} sequences are to be written, each of which is "
            "processed for itself here: pass "
            "one sequence at a time, or fallback=True for transformers' own generate"
        )


def _pad_and_stack(rows: list[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """[B, longest]; shorter ones are padded on the right, as transformers pads what has ended."""
    longest = max(row.shape[1] for row in rows)
    pad = (
        *parse_token_ids("pad_token_id", settings.get("pad_token_id")),
        *parse_token_ids("eos_token_id", settings.get("eos_token_id")),
        0,
    )[0]
    return torch.cat(
        [nn.functional.pad(row, (0, longest - row.shape[1]), value=pad) for row in rows]
    )
