"""`load_model`: from a name to a `ModelAdapter`, with one plain sentence for each way that can fail.

Weights are read from safetensors only, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipsearch.errors import ModelError
from skipsearch.models.families import family_of
from skipsearch.models.hf import HFAdapter
from skipsearch.models.names import ALIASES
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.names import unknown

DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def load_model(name: str, device: str = "auto", dtype: str = "auto") -> ModelAdapter:
    """Load `demo`, an alias (`llama-2-13b`), a Hub id (`org/name[@revision]`) or a local folder.

    device: auto (a GPU if there is one), cpu, cuda, cuda:1, … dtype: auto (bfloat16 on a GPU, float32 on a CPU) or a name.
    Raises: ModelError with what to do.
    """
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    folder, identity, revision = locate(name)
    config = _read_config(folder, name)
    family = family_of(config)
    model = _read_weights(folder, name, chosen_dtype).to(chosen_device).eval().requires_grad_(False)
    spec = ModelSpec(
        id=identity, revision=revision, family=config.model_type, n_layers=config.num_hidden_layers, hidden=config.hidden_size,
        vocab=config.vocab_size, context=getattr(config, "max_position_embeddings", None), dtype=chosen_dtype, device=chosen_device,
        config_sha256=config_hash(config), weights_sha256=weights_hash(folder), eos_token_ids=_eos_ids(model))
    return HFAdapter(model, spec, family, _read_tokenizer(folder))


def adapt(model: nn.Module, tokenizer: Any = None) -> ModelAdapter:
    """The adapter of a Hugging Face model that is already in memory; the model is not altered. Raises: ModelError."""
    config: Any = model.config
    family = family_of(config)
    weight = next(model.parameters())
    spec = ModelSpec(
        id=getattr(config, "_name_or_path", "") or config.model_type, revision=None, family=config.model_type,
        n_layers=config.num_hidden_layers, hidden=config.hidden_size, vocab=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None), dtype=weight.dtype, device=weight.device,
        config_sha256=config_hash(config), eos_token_ids=_eos_ids(model))
    return HFAdapter(model, spec, family, tokenizer)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"there is no device called {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for and torch sees no GPU here; use --device cpu, or install a CUDA build of torch")
    if device.type not in {"cpu", "cuda"}:
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ModelError(f"{unknown('dtype', name, DTYPES)}; or auto")
    return DTYPES[name]


def locate(name: str) -> tuple[Path, str, str | None]:
    """(folder with the files, model id, revision) of a name; downloads from the Hub where it must. Raises: ModelError."""
    if not name.strip():
        raise ModelError("the model name is empty; use demo, an alias (skipsearch list models), a Hub id or a folder")
    if name == "demo":
        return DEMO_FOLDER, "demo", None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name, None
    hub_id = ALIASES.get(name.lower(), name)
    if not HUB_ID.fullmatch(hub_id) or folder.exists() or name.startswith((".", "/", "~")):
        raise ModelError(f"{unknown('model', name, ['demo', *ALIASES])}; a Hub id has the form org/name[@revision], and no folder has this name")
    repo, _, revision = hub_id.partition("@")
    return _download(repo, revision or None), repo, revision or None


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=["*.json", "*.safetensors", "tokenizer.model", "*.txt"]))
    except GatedRepoError:
        raise ModelError(f"{repo} is gated: accept its licence on its Hub page, then log in with `hf auth login`") from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision!r}; look up its branches and tags on its Hub page") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the Hub has no model {repo!r}, or it is private: check the spelling, or log in with `hf auth login`") from None
    except LocalEntryNotFoundError:
        raise ModelError(f"{repo} is not in the local cache and the Hub cannot be reached: connect once to download it, or pass a folder") from None
    except HfHubHTTPError as error:
        raise ModelError(f"downloading {repo} failed: {str(error).splitlines()[0]}; try again, or pass a folder") from None
    except OSError as error:
        raise ModelError(f"downloading {repo} failed: {error.strerror or error}; free some space or check the connection, then try again") from None


def _read_config(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: {folder} has no config.json, so it is not a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ModelError(f"{name}: its config.json cannot be used ({reason}); models with their own code are not run") from None


def _read_weights(folder: Path, name: str, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    missing = _missing_shards(folder)
    if missing:
        raise ModelError(f"{name}: {folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                         + "; only safetensors weights are read: download the rest, or convert the model")
    try:
        with _quietly():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False,
                local_files_only=True, output_loading_info=True)
    except SafetensorError as error:
        raise ModelError(f"{name}: a weight file is damaged ({error}); download it again") from None
    except torch.OutOfMemoryError:
        raise ModelError(f"{name} does not fit into memory as {dtype}; use --dtype bfloat16 or a larger device") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be loaded: {str(error).splitlines()[0][:300]}") from None
    if report.get("missing_keys") or report.get("mismatched_keys"):
        key = sorted(map(str, report.get("missing_keys") or report["mismatched_keys"]))[0]
        raise ModelError(f"{name}: the weights do not fit the config ({key} is missing or has another shape); is the folder complete?")
    return model


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise ModelError(f"{index} is not a readable index of weight files; download it again") from None
        return [w for w in wanted if not (folder / w).is_file()]
    return [] if (folder / "model.safetensors").is_file() else ["model.safetensors"]


def _read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None: a model without one still works on token ids."""
    from transformers import AutoTokenizer

    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")):
        return None
    try:
        with _quietly():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"the tokenizer in {folder} cannot be read ({str(error).splitlines()[0][:200]}); download it again") from None


def _eos_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def config_hash(config: Any) -> str:
    """sha256 of the canonical config without what does not change the function: paths, versions, dtype, cache use."""
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "_attn_implementation"}
    data = {k: v for k, v in config.to_dict().items() if k not in ignored and not k.startswith("_")}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def weights_hash(folder: Path) -> str:
    """sha256 over the names and sha256 sums of the folder's safetensors files.

    A file of the Hub's cache is a link to a blob that is named by its own sum, so nothing large is read there.
    """
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.resolve().name
        if not re.fullmatch(r"[0-9a-f]{64}", blob):
            with path.open("rb") as file:
                blob = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {blob}\n".encode())
    return total.hexdigest()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' own progress bars and warnings: what matters of them is raised or printed by us."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
