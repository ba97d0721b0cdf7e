"""llama.cpp over the same weights, by its Python bindings: plain, with drafts looked up in the
text, and the cost of a pass by rows.
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

from skipsearch.bench.gguf_writer import Q8_0, write_gguf
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter

PLAIN, LOOKUP = "llama-cpp", "llama-cpp-lookup"
NAMES = (PLAIN, LOOKUP)
MIN_CONTEXT_TOKENS = 512  # tokens of the first context
MAX_PASS_TOKENS = 512  # tokens of a pass at most, llama.cpp's own choice
TIMING_REPEATS = 9  # of each timing of `row_costs`


class LlamaCpp:
    """A model that llama.cpp holds, by as many threads as torch uses, and one text in its cache.
    Its K/V are float16, as it has them.
    """

    def __init__(self, model: ModelAdapter, int8: bool = False):
        """model: held by Hugging Face's modules. int8: its weights as Q8_0; llama.cpp then rounds
        what goes into a matrix to 8 bits, too, so that its tokens may differ. Raises: DecodeError
        where llama.cpp is not there or cannot run it."""
        hf = getattr(model, "model", None)
        if hf is None or model.spec.device.type != "cpu":
            raise DecodeError(
                "llama.cpp takes part on a CPU, with weights of Hugging Face's modules, and "
                f"{model.spec.id} has none there"
            )
        try:
            import gguf  # noqa: F401
            import llama_cpp
        except ImportError:
            raise DecodeError(
                "the system llama-cpp needs llama-cpp-python and gguf: pip install "
                "'skipsearch[llama-cpp]'"
            ) from None
        self.api: Any = llama_cpp
        self.int8 = int8
        self.dtype, self.vocab_size = Q8_0 if int8 else model.spec.dtype_name, model.spec.vocab_size
        self.context, self.context_tokens, self.threads = None, 0, 0
        self._log_callback = llama_cpp.llama_log_callback(
            lambda level, text, data: None
        )  # held, or C would call what is gone
        llama_cpp.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(hf, path, int8)
            params: Any = llama_cpp.llama_model_default_params()
            params.use_mmap = False  # the file is gone in a moment
            self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if self.model is None:
            raise DecodeError(f"llama.cpp does not load the weights of {model.spec.id}")
        self.batch: Any = llama_cpp.llama_batch_init(MAX_PASS_TOKENS, 0, 1)

    def reset(self, max_tokens: int) -> None:
        """Forget the text, and have room for so many tokens. Raises: DecodeError."""
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
            self.context = self.api.llama_init_from_model(self.model, params)
            if self.context is None:
                raise DecodeError(f"llama.cpp has no room for {self.context_tokens} tokens")
        self.truncate(0)

    def truncate(self, n_tokens: int) -> None:
        """Forget what stands behind the first `n_tokens` of the text."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, n_tokens, -1)

    def decode(self, tokens: Sequence[int], start: int, all_positions: bool = False) -> list[int]:
        """A pass over tokens behind `start` others: the most likely token behind the last of them,
        or with `all_positions` behind each.
        """
        found: list[int] = []
        for at in range(0, len(tokens), MAX_PASS_TOKENS):
            piece, batch = tokens[at : at + MAX_PASS_TOKENS], self.batch
            asked = [i for i in range(len(piece)) if all_positions or at + i == len(tokens) - 1]
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                    token,
                    start + at + i,
                    1,
                    int(i in asked),
                )
                batch.seq_id[i][0] = 0
            batch.n_tokens = len(piece)
            if self.api.llama_decode(self.context, batch):
                raise DecodeError(
                    f"llama.cpp failed at a pass over {len(piece)} tokens behind {start + at}"
                )
            for i in asked:
                logits = np.ctypeslib.as_array(
                    self.api.llama_get_logits_ith(self.context, i), (self.vocab_size,)
                )
                found.append(int(logits.argmax()))
        return found

    def time_rows(self, rows: int, context: int) -> list[float]:
        """Median seconds of a pass over 1 … rows tokens behind `context` others, taken in turns."""
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
        return [median(found) for found in times]


class LlamaGenerate:
    """Greedy decoding by the name of `NAMES`. The lookup asks the bindings' own
    `LlamaPromptLookupDecoding`, with its settings.
    """

    def __init__(self, name: str, llama: LlamaCpp):
        self.name, self.llama = name, llama

    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float, float]:
        """(tokens, seconds to the first, seconds of the others)."""
        llama = self.llama
        draft = self._make_lookup() if self.name == LOOKUP else None
        llama.reset(len(prompt) + new_tokens + 16)
        text = list(prompt)
        started = perf_counter()
        text += llama.decode(text, 0)
        first = perf_counter()
        while (left := len(prompt) + new_tokens - len(text)) > 0:
            known = len(text) - 1
            drafted = (
                []
                if draft is None or left == 1
                else [int(t) for t in draft(np.array(text, dtype=np.intc))][: left - 1]
            )
            says = llama.decode([text[-1], *drafted], known, all_positions=True)
            right = next((i for i, token in enumerate(drafted) if token != says[i]), len(drafted))
            text += [*drafted[:right], says[right]]
            if right < len(drafted):
                llama.truncate(known + 1 + right)
        return text[len(prompt) :], first - started, perf_counter() - first

    def _make_lookup(self) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding()
