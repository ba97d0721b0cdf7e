"""llama.cpp over the same weights, by its Python bindings: plain, with drafts looked up in the text, and the cost of a pass by rows."""

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

from skipsearch.bench.gguf_file import EIGHT_BITS, write_gguf
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter

PLAIN, LOOKUP = "llama-cpp", "llama-cpp-lookup"
NAMES = (PLAIN, LOOKUP)
LEAST_ROOM = 512     # tokens of the first context
BATCH = 512          # tokens of a pass at most, llama.cpp's own choice
REPEATS = 9          # of each timing of `row_costs`


class LlamaCpp:
    """A model that llama.cpp holds, by as many threads as torch uses, and one text in its cache. Its K/V are float16, as it has them."""

    def __init__(self, model: ModelAdapter, eight_bits: bool = False):
        """model: held by Hugging Face's modules. eight_bits: its weights as Q8_0; llama.cpp then rounds what goes into a matrix to 8 bits,
        too, so that its tokens may differ. Raises: DecodeError where llama.cpp is not there or cannot run it."""
        hf = getattr(model, "model", None)
        if hf is None or model.spec.device.type != "cpu":
            raise DecodeError(f"llama.cpp takes part on a CPU, with weights of Hugging Face's modules, and {model.spec.id} has none there")
        try:
            import gguf  # noqa: F401
            import llama_cpp
        except ImportError:
            raise DecodeError("the peer llama-cpp needs llama-cpp-python and gguf: pip install 'skipsearch[llama-cpp]'") from None
        self.api: Any = llama_cpp
        self.eight_bits = eight_bits
        self.dtype, self.vocab = EIGHT_BITS if eight_bits else model.spec.dtype_name, model.spec.vocab
        self.context, self.room, self.threads = None, 0, 0
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)   # held, or C would call what is gone
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(hf, path, eight_bits)
            params: Any = llama_cpp.llama_model_default_params()
            params.use_mmap = False   # the file is gone in a moment
            self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if self.model is None:
            raise DecodeError(f"llama.cpp does not load the weights of {model.spec.id}")
        self.batch: Any = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def new_text(self, tokens: int) -> None:
        """Forget the text, and have room for so many tokens. Raises: DecodeError."""
        if tokens > self.room or self.threads != torch.get_num_threads():
            if self.context is not None:
                self.api.llama_free(self.context)
            self.room, self.threads = max(LEAST_ROOM, 1 << (tokens - 1).bit_length()), torch.get_num_threads()
            params = self.api.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = self.room, BATCH, BATCH, 1
            params.n_threads = params.n_threads_batch = self.threads
            self.context = self.api.llama_init_from_model(self.model, params)
            if self.context is None:
                raise DecodeError(f"llama.cpp has no room for {self.room} tokens")
        self.keep(0)

    def keep(self, tokens: int) -> None:
        """Forget what stands behind the first `tokens` of the text."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, tokens, -1)

    def decode(self, tokens: Sequence[int], start: int, every: bool = False) -> list[int]:
        """A pass over tokens behind `start` others: the most likely token behind the last of them, or with `every` behind each."""
        found: list[int] = []
        for at in range(0, len(tokens), BATCH):
            piece, batch = tokens[at:at + BATCH], self.batch
            asked = [i for i in range(len(piece)) if every or at + i == len(tokens) - 1]
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + at + i, 1, int(i in asked)
                batch.seq_id[i][0] = 0
            batch.n_tokens = len(piece)
            if self.api.llama_decode(self.context, batch):
                raise DecodeError(f"llama.cpp failed at a pass over {len(piece)} tokens behind {start + at}")
            for i in asked:
                logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, i), (self.vocab,))
                found.append(int(logits.argmax()))
        return found

    def row_costs(self, rows: int, context: int) -> list[float]:
        """Median seconds of a pass over 1 … rows tokens behind `context` others, taken in turns."""
        self.new_text(context + rows)
        self.decode([1] * context, 0)
        times: list[list[float]] = [[] for _ in range(rows)]
        for _ in range(REPEATS):
            for n in range(1, rows + 1):
                for timed in (False, True):
                    self.keep(context)
                    started = perf_counter()
                    self.decode([1] * n, context, every=True)
                    if timed:
                        times[n - 1].append(perf_counter() - started)
        return [median(found) for found in times]


class LlamaGenerate:
    """Greedy decoding by the name of `NAMES`. The lookup asks the bindings' own `LlamaPromptLookupDecoding`, with its settings."""

    def __init__(self, name: str, llama: LlamaCpp):
        self.name, self.llama = name, llama

    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float, float]:
        """(tokens, seconds to the first, seconds of the others)."""
        llama = self.llama
        draft = self._lookup() if self.name == LOOKUP else None
        llama.new_text(len(prompt) + new_tokens + 16)
        text = list(prompt)
        started = perf_counter()
        text += llama.decode(text, 0)
        first = perf_counter()
        while (left := len(prompt) + new_tokens - len(text)) > 0:
            known = len(text) - 1
            drafted = [] if draft is None or left == 1 else [int(t) for t in draft(np.array(text, dtype=np.intc))][:left - 1]
            says = llama.decode([text[-1], *drafted], known, every=True)
            right = next((i for i, token in enumerate(drafted) if token != says[i]), len(drafted))
            text += [*drafted[:right], says[right]]
            if right < len(drafted):
                llama.keep(known + 1 + right)
        return text[len(prompt):], first - started, perf_counter() - first

    def _lookup(self) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding()
