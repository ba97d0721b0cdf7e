"""Run llama.cpp on the same weights, through llama-cpp-python.

It decodes plainly or with prompt lookup, and the time of a pass is measured by number of tokens.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from skipsearch.bench.gguf_writer import write_gguf
from skipsearch.core.sequences import common_prefix_length
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.quantize import split_activations, split_kv_cache_dtype

PLAIN, LOOKUP = "llama-cpp", "llama-cpp-lookup"
NAMES = (PLAIN, LOOKUP)
MIN_CONTEXT_TOKENS = 512  # capacity of the first context
MAX_PASS_TOKENS = 512  # of one pass: llama.cpp's default
TIMING_REPEATS = 9  # of each number of tokens in `time_rows`


class LlamaCpp:
    """A model in llama.cpp with one sequence in its KV cache.

    It runs on as many threads as torch uses. Its K/V are float16, llama.cpp's default, or Q8_0 if
    the model stores its own in int8.
    """

    def __init__(self, model: ModelAdapter, bits: int | None = None, gguf_file: Path | None = None):
        """Load the weights of a model.

        model: a model on the CPU. Without `gguf_file`, its weights are written to a temporary GGUF
            file, so they must be in a Hugging Face model (`model.model`). With `gguf_file`, any
            engine may run it, because only its `spec` is read.
        bits: 8, 5 or 4: round the matrices of the temporary file, as the quantization
            `native-8bit`, `native-5bit` or `native-4bit` does; None: keep their dtype.
        gguf_file: a GGUF file with the weights, which are used as they are.

        Raises: DecodeError if llama.cpp is not installed or cannot run the model.
        """
        hf = getattr(model, "model", None)
        if (hf is None and gguf_file is None) or model.spec.device.type != "cpu":
            raise DecodeError(
                "llama.cpp takes part on a CPU, with weights of Hugging Face's modules, and "
                f"{model.spec.id} has none there"
            )
        try:
            import llama_cpp
        except ImportError:
            raise DecodeError(
                "the system llama-cpp needs llama-cpp-python: CMAKE_ARGS=-DGGML_NATIVE=ON pip "
                "install 'skipsearch[llama-cpp]'"
            ) from None
        self.api: Any = llama_cpp
        self.bits = bits
        self.rounds_inputs = bits is not None or gguf_file is not None
        self.dtype = f"Q{bits}_0" if bits else model.spec.dtype_name
        if gguf_file is not None:
            self.dtype = str(split_activations(model.spec.quantization, None)[0])
        self.has_int8_kv = split_kv_cache_dtype(model.spec.quantization)[1] == "int8"
        self.vocab_size = model.spec.vocab_size
        self.context, self.context_tokens, self.threads = None, 0, 0
        # The callback is kept alive here, because C calls it for as long as the process runs.
        self._log_callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = gguf_file or Path(folder) / "model.gguf"
            if gguf_file is None:
                write_gguf(hf, path, bits)
            params: Any = llama_cpp.llama_model_default_params()
            params.use_mmap = False  # the file is deleted right after loading
            self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if self.model is None:
            raise DecodeError(f"llama.cpp does not load the weights of {model.spec.id}")
        self.batch: Any = llama_cpp.llama_batch_init(MAX_PASS_TOKENS, 0, 1)

    def reset(self, max_tokens: int) -> None:
        """Empty the KV cache and give it a capacity of at least `max_tokens`.

        Raises: DecodeError if llama.cpp cannot allocate it.
        """
        if max_tokens > self.context_tokens or self.threads != torch.get_num_threads():
            if self.context is not None:
                self.api.llama_free(self.context)
            self.context_tokens, self.threads = (
                max(MIN_CONTEXT_TOKENS, 1 << (max_tokens - 1).bit_length()),
                torch.get_num_threads(),
            )
            params = self.api.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
                self.context_tokens,
                MAX_PASS_TOKENS,
                MAX_PASS_TOKENS,
                1,
            )
            params.n_threads = params.n_threads_batch = self.threads
            if self.has_int8_kv:  # values in Q8_0 need flash attention
                params.type_k = params.type_v = self.api.GGML_TYPE_Q8_0
                params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            self.context = self.api.llama_init_from_model(self.model, params)
            if self.context is None:
                raise DecodeError(f"llama.cpp has no memory for {self.context_tokens} tokens")
        self.truncate(0)

    def truncate(self, n_tokens: int) -> None:
        """Drop all tokens after the first `n_tokens` from the KV cache."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, n_tokens, -1)

    def decode(self, tokens: Sequence[int], start: int, all_positions: bool = False) -> list[int]:
        """Run a pass over `tokens` after `start` cached tokens; return the most likely next token.

        The result is a list of one token. all_positions: return the most likely next token after
        each of `tokens`.

        Raises: DecodeError if llama.cpp fails.
        """
        next_tokens: list[int] = []
        for at in range(0, len(tokens), MAX_PASS_TOKENS):
            chunk, batch = tokens[at : at + MAX_PASS_TOKENS], self.batch
            wanted = [i for i in range(len(chunk)) if all_positions or at + i == len(tokens) - 1]
            for i, token in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                    token,
                    start + at + i,
                    1,
                    int(i in wanted),
                )
                batch.seq_id[i][0] = 0
            batch.n_tokens = len(chunk)
            if self.api.llama_decode(self.context, batch):
                raise DecodeError(
                    f"llama.cpp failed at a pass over {len(chunk)} tokens after {start + at}"
                )
            for i in wanted:
                logits = np.ctypeslib.as_array(
                    self.api.llama_get_logits_ith(self.context, i), (self.vocab_size,)
                )
                next_tokens.append(int(logits.argmax()))
        return next_tokens

    def time_rows(self, rows: int, context: int) -> list[float]:
        """Return the median seconds of passes over 1 … `rows` tokens after `context` other tokens.

        Passes of different lengths are timed in turn.
        """
        self.reset(context + rows)
        self.decode([1] * context, 0)
        times: list[list[float]] = [[] for _ in range(rows)]
        for _ in range(TIMING_REPEATS):
            for n in range(1, rows + 1):
                for timed in (False, True):
                    self.truncate(context)
                    started = perf_counter()
                    self.decode([1] * n, context, all_positions=True)
                    if timed:
                        times[n - 1].append(perf_counter() - started)
        return [median(seconds) for seconds in times]


class LlamaGenerate:
    """Greedy decoding with llama.cpp, by one of `NAMES`.

    Lookup uses the bindings' own `LlamaPromptLookupDecoding` with its default settings.
    """

    def __init__(self, name: str, llama: LlamaCpp):
        self.name, self.llama = name, llama

    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float, float]:
        """Generate `new_tokens` tokens.

        Returns (tokens, seconds to the first token, seconds of the other tokens).
        """
        llama = self.llama
        draft = self._make_lookup() if self.name == LOOKUP else None
        llama.reset(len(prompt) + new_tokens + 16)
        text = list(prompt)
        started = perf_counter()
        text += llama.decode(text, 0)
        first = perf_counter()
        while (remaining := len(prompt) + new_tokens - len(text)) > 0:
            n_cached = len(text) - 1
            drafted = (
                []
                if draft is None or remaining == 1
                else [int(t) for t in draft(np.array(text, dtype=np.intc))][: remaining - 1]
            )
            greedy = llama.decode([text[-1], *drafted], n_cached, all_positions=True)
            n_accepted = common_prefix_length(drafted, greedy)
            text += [*drafted[:n_accepted], greedy[n_accepted]]
            if n_accepted < len(drafted):
                llama.truncate(n_cached + 1 + n_accepted)
        return text[len(prompt) :], first - started, perf_counter() - first

    def _make_lookup(self) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding()
