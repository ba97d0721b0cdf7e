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

from skipsearch.decoding.arguments import shown
from skipsearch.decoding.batch import Batch
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.inputs import PromptRow, read_ids, read_prompts
from skipsearch.decoding.keeping import kept_decoder, rest
from skipsearch.decoding.prefix import Lender
from skipsearch.decoding.processing import OURS, read_criteria, read_processors
from skipsearch.decoding.request import Request
from skipsearch.decoding.settings import read_count, read_new_tokens, read_sampling, read_settings
from skipsearch.decoding.steering import Steering
from skipsearch.decoding.watching import Watch
from skipsearch.errors import DecodeError, ModelError, NotCarriedOut
from skipsearch.mask import SkipMask
from skipsearch.models.loader import family_and_spec
from skipsearch.models.spec import ModelAdapter
from skipsearch.profile import Profile
from skipsearch.recipe import Recipe


def generate(model: nn.Module, input_ids: Any = None, profile: Profile | Recipe | SkipMask | None = None, *, inputs: Any = None,
             generation_config: Any = None, stopping_criteria: Any = None, streamer: Any = None, tokenizer: Any = None,
             seed: int | None = None, fallback: bool = False, **settings: Any) -> Any:
    """[B, T] prompts -> [B, T + new] prompts and continuations, as `model.generate` returns them, drafted as `profile` says.

    input_ids: [B, T], [T], or a list; `inputs` is another name for it. `generate(model, **tokenizer(text, return_tensors="pt"))` works.
    The rows of a batch, padded on the left, are decoded side by side; each gets the tokens that it gets alone.
    generation_config: over the model's own; keyword arguments override its fields (max_new_tokens, do_sample, repetition_penalty, …).
    logits_processor, prefix_allowed_tokens_fn: called once for each emitted token, in order. stopping_criteria: called after each token
    with the tokens so far, and with the scores so far where output_scores asks for them. streamer: gets the prompt, then each token.
    tokenizer: needed for stop_strings. seed: of sampling; drawn from torch's global generator if None, so that `torch.manual_seed`
    repeats a call. return_dict_in_generate returns an output with sequences, and with scores and logits if they are asked for; the cache is
    not handed out.
    fallback: hand what this decoder does not carry out to `model.generate`, which drafts nothing then.

    Whatever `model.generate` takes is carried out, or has no effect, or is refused by name; nothing that would change tokens is ignored.
    Raises: DecodeError for settings that make no sense, NotCarriedOut for those that transformers alone carries out; ModelError,
    ProfileError, MaskError.
    """
    if hasattr(model, "spec"):
        raise ModelError(f"the model is a {type(model).__name__} of skipsearch: use skipsearch.Decoder(model, profile).generate, or give "
                         "the Hugging Face model itself")
    try:
        return _generate(model, input_ids, profile, inputs, generation_config, stopping_criteria, streamer, tokenizer, seed, settings)
    except NotCarriedOut:
        if not fallback:
            raise
    named = {"inputs": input_ids if inputs is None else inputs, "generation_config": generation_config,
             "stopping_criteria": stopping_criteria, "streamer": streamer, "tokenizer": tokenizer}
    kind: Any = type(model)   # whose generate it is also where `attach` has put ours in the model's own place
    return kind.generate(model, **{name: value for name, value in named.items() if value is not None}, **settings)


@dataclass
class _Row:
    """One continuation. ids: [1, T + new]. scores, logits: [1, V] for each new token, where they were asked for."""

    ids: Tensor
    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None


@dataclass
class _Call:
    """What all rows of a call have in common. adapter: the decoder's model with the end-of-sequence tokens of this call."""

    model: Any
    decoder: Decoder
    adapter: ModelAdapter
    asked: Mapping[str, Any]
    criteria: Any
    streamer: Any
    new: int
    batch: int

    def rows(self, prompts: list[PromptRow], seeds: list[int]) -> list[_Row]:
        """The continuation of each. What prompts begin with alike is computed once."""
        if len(prompts) == 1:
            return [self.row(prompts[0], 0, seeds[0], None)]
        # Sampled rows draft as they would alone, and so get the samples that their seeds get alone.
        plain_from = self.decoder.plain_from if read_sampling(self.asked).greedy else None
        with closing(Batch(self.decoder, len(prompts), plain_from)) as batch:
            rows = [batch.start(partial(self.row, prompt, number, seed, batch.lender(owner="caller"), batch.watch()))
                    for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))]
            while batch.rows:
                batch.step()
                failed = next((row.error for row in rows if row.error is not None), None)
                if failed is not None:
                    raise failed
        return [row.result for row in rows]

    def row(self, prompt: PromptRow, number: int, seed: int, lender: Lender | None, watch: Watch | None = None) -> _Row:
        """The continuation of a prompt."""
        keeps = bool(self.asked.get("return_dict_in_generate"))
        scores, logits = (keeps and bool(self.asked.get(f"output_{name}")) for name in ("scores", "logits"))
        seen = torch.ones_like(prompt.ids)
        seen[:, :prompt.padding] = 0
        processors = read_processors(self.model, self.asked, prompt.ids, seen, self.new, number)
        sampling = read_sampling(self.asked)
        ready = Request(prompt.seen, self.new, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
                        seed=seed).ready(self.adapter)
        if self.streamer is not None:
            self.streamer.put(prompt.ids.cpu())
        ids = torch.cat([prompt.ids, prompt.ids.new_zeros(1, self.new)], dim=1)
        length = prompt.ids.shape[1]
        steering = None
        if scores or logits or not {type(processor).__name__ for processor in processors} <= OURS:
            ready.steering = steering = Steering(processors, prompt.ids, self.new, not sampling.greedy, self._last, scores, logits)
        with closing(self.decoder.loop.stream(ready, lender, watch)) as stream:  # type: ignore[type-var]
            for token in (token for chunk in stream for token in chunk.tokens):
                ids[0, length] = token
                length += 1
                if self._emitted(ids[:, :length], None) if steering is None else steering.ended and length == steering.ids.shape[1]:
                    break
        return _Row(ids[:, :length].clone(), *((steering.scores, steering.logits) if steering is not None else ()))

    def _last(self, ids: Tensor, scores: list[Tensor] | None) -> bool:
        """As `_emitted`; an end-of-sequence token, which the loop sees by itself elsewhere, is the last too."""
        return self._emitted(ids, scores) or int(ids[0, -1]) in self.adapter.spec.eos_token_ids

    def _emitted(self, ids: Tensor, scores: list[Tensor] | None) -> bool:
        """A token is emitted: show it, and ask whether it is the last."""
        if self.streamer is not None:
            self.streamer.put(ids[0, -1:].cpu())
        return bool(self.criteria) and bool(self.criteria(ids, None if scores is None else tuple(scores)).all())


def _generate(model: Any, input_ids: Any, profile: Any, inputs: Any, generation_config: Any, stopping_criteria: Any, streamer: Any,
              tokenizer: Any, seed: int | None, settings: Mapping[str, Any]) -> Any:
    _, spec = family_and_spec(model)   # a model that cannot be driven is refused before settings are read against it
    asked = read_settings(model, generation_config, settings)
    decoder = kept_decoder(model, spec, profile, repeatable=not read_sampling(asked).greedy)
    try:
        return _generated(model, decoder, asked, input_ids, inputs, stopping_criteria, streamer, tokenizer, seed)
    finally:
        rest(decoder)


def _generated(model: Any, decoder: Decoder, asked: Mapping[str, Any], input_ids: Any, inputs: Any, stopping_criteria: Any, streamer: Any,
               tokenizer: Any, seed: int | None) -> Any:
    adapter = copy.copy(decoder.model)   # other calls may have other end-of-sequence tokens
    adapter.spec = replace(adapter.spec, eos_token_ids=read_ids("eos_token_id", asked.get("eos_token_id")))
    prompts = read_prompts(model, adapter.spec.device, input_ids, inputs, asked)
    length = prompts[0].ids.shape[1]
    new = read_new_tokens(asked, length, getattr(model.config, "max_position_embeddings", None))
    for prompt in prompts:
        room = None if adapter.spec.context is None else adapter.spec.context - (length - prompt.padding)
        if room is not None and 0 < room < new:
            raise NotCarriedOut(f"{new} tokens more were asked for, and after this prompt there is room for {room} in the context that the "
                                f"model was made for, {adapter.spec.context}: pass max_new_tokens={room}, or call model.generate")
    sampling, count = read_sampling(asked), read_count(asked)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise DecodeError(f"streamer is {shown(streamer)}; give an object with `put` and `end`, such as a transformers.TextStreamer")
    criteria = read_criteria(asked, stopping_criteria, tokenizer)
    rows = [prompt for prompt in prompts for _ in range(count)]
    if len(rows) > 1:
        _check_batch(len(rows), asked, stopping_criteria, criteria, streamer, adapter.spec.eos_token_ids)
    if seed is None:
        seed = 0 if sampling.greedy else int(torch.randint(2**63 - 1, (1,)))
    call = _Call(model, decoder, adapter, asked, criteria, streamer, new, len(rows))
    if not isinstance(seed, int) or isinstance(seed, bool):
        Request([0], seed=seed).ready(adapter)   # refuses it
    done = call.rows(rows, [seed, *((seed + i) % 2**63 for i in range(1, len(rows)))])
    if streamer is not None:
        streamer.end()
    sequences = _stacked([row.ids for row in done], asked)
    if not asked.get("return_dict_in_generate"):
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    scores, logits = (None if kept is None else tuple(kept) for kept in (done[0].scores, done[0].logits))
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


def _check_batch(rows: int, asked: Mapping[str, Any], given: Any, criteria: Any, streamer: Any, eos: tuple[int, ...]) -> None:
    """Rows end and accept drafts each for itself, and transformers calls what it is given for all of them at once: refuses what could tell.

    Raises: DecodeError.
    """
    if streamer is not None:
        raise DecodeError(f"streamer is given, and {rows} sequences are to be written: a streamer takes one")
    watched = {"logits_processor": asked.get("logits_processor"), "stopping_criteria": given,
               "output_scores": asked.get("output_scores"), "output_logits": asked.get("output_logits")}
    name = next((name for name, value in watched.items() if value), None)
    if name is None and len(criteria) and not eos:
        name = "stop_strings or max_time without an eos_token_id"   # transformers writes on in a row that has stopped
    if name is not None:
        raise NotCarriedOut(f"{name} is given, and {rows} sequences are to be written, each of which is processed for itself here: pass "
                            "one sequence at a time, or fallback=True for transformers' own generate")


def _stacked(rows: list[Tensor], asked: Mapping[str, Any]) -> Tensor:
    """[B, longest]; shorter ones are padded on the right, as transformers pads what has ended."""
    longest = max(row.shape[1] for row in rows)
    pad = (*read_ids("pad_token_id", asked.get("pad_token_id")), *read_ids("eos_token_id", asked.get("eos_token_id")), 0)[0]
    return torch.cat([nn.functional.pad(row, (0, longest - row.shape[1]), value=pad) for row in rows])
