"""K/V of earlier prompts on a disk, so that they survive a restart of the server."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from skipsearch.core.files import hash_facts, make_private_dir
from skipsearch.core.machine import describe_machine, software_versions
from skipsearch.core.sequences import common_prefix_length
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, round_slots
from skipsearch.models.stored_checks import hash_own_code

MIN_TOKENS = 256  # of a text that is stored; a shorter one is computed about as fast as read
SUFFIX = ".prefix"


@dataclass(frozen=True)
class StoredPrefix:
    """A text whose K/V are stored."""

    path: Path
    tenant: str  # hash
    tokens: list[int]


class PrefixDisk:
    """The K/V of texts in a folder, limited in bytes, those used longest ago removed first.

    K/V depend on the model, its format, the engine and the machine, so texts of other models, or of
    other versions of the program, are not read; they count for the limit. One thread may store a
    text while another looks for one. Several servers may use one folder.
    """

    def __init__(self, folder: Path, max_bytes: int, model: ModelAdapter):
        """Make the folder, and read which texts it holds. Raises: OSError."""
        self.folder, self.max_bytes, self.model = folder, max_bytes, model
        spec = model.spec
        facts = [spec.facts(), spec.engine, str(spec.device), software_versions(), hash_own_code()]
        self._key = hash_facts([facts, describe_machine(spec.device).name])[:32]
        make_private_dir(folder)
        self._prefixes: list[StoredPrefix] = []
        self._lock = RLock()  # of the list
        for path in sorted(folder.glob(f"{self._key}-*{SUFFIX}")):
            with suppress(OSError, SafetensorError, ValueError, KeyError, TypeError):
                with safe_open(path, framework="pt") as file:
                    facts_of_text = file.metadata()
                tokens = [int(token) for token in json.loads(facts_of_text["tokens"])]
                self._prefixes.append(StoredPrefix(path, facts_of_text["tenant"], tokens))

    def count_shared(self, tenant: str, prompt: Sequence[int]) -> int:
        """Return the most tokens that a prompt shares with a stored text of its tenant."""
        best = self._find(tenant, prompt)
        return 0 if best is None else common_prefix_length(best.tokens, prompt)

    def load(self, tenant: str, prompt: Sequence[int]) -> PrefixCache | None:
        """Return the text of a tenant that shares most tokens with a prompt.

        Return None, and remove the file, if it is damaged.
        """
        best = self._find(tenant, prompt)
        if best is None:
            return None
        try:
            cache = self._read(best)
            os.utime(best.path)
        except (OSError, SafetensorError, ValueError, KeyError):
            self._remove(best)
            return None
        return PrefixCache.restore(best.tokens, cache)

    def store(self, tenant: str, prefix: PrefixCache) -> None:
        """Write the K/V of a text, unless it is short or stored already.

        Stored texts that it continues are removed. A full disk stores nothing, nor does a model
        that was not loaded from files, or that has a state other than K/V in slots.
        """
        cache, owner = prefix.cache, _hash_tenant(tenant)
        with self._lock:
            own = [stored for stored in self._prefixes if stored.tenant == owner]
        is_known = self.model.spec.weights_sha256 is not None  # another model may have its name
        if len(prefix.tokens) < MIN_TOKENS or type(cache) is not KVCache or not is_known:
            return
        n_shared = {s.path: common_prefix_length(s.tokens, prefix.tokens) for s in own}
        if len(prefix.tokens) in n_shared.values():
            return
        n_tokens = len(prefix.tokens)
        tensors = {
            f"{name}.{layer}": buffer[:, :, :n_tokens].detach().cpu().contiguous()
            for name, side in (("key", cache.keys), ("value", cache.values))
            for layer, buffer in enumerate(side)
            if buffer is not None
        }
        n_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if n_bytes > self.max_bytes:
            return
        digest = hashlib.sha256(json.dumps([owner, prefix.tokens]).encode()).hexdigest()[:32]
        path = self.folder / f"{self._key}-{digest}{SUFFIX}"
        temporary = self.folder / f".{secrets.token_hex(6)}{SUFFIX}.tmp"
        try:
            self._free(n_bytes)
            facts = {"tenant": owner, "tokens": json.dumps(prefix.tokens)}
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            save_file(tensors, temporary, {**facts, "checksum": str(_sum_tensors(tensors))})
            os.replace(temporary, path)
        except (OSError, SafetensorError):
            return
        finally:
            with suppress(OSError):
                temporary.unlink()
        with self._lock:
            for stored in own:
                if n_shared[stored.path] == len(stored.tokens):
                    self._remove(stored)
            self._prefixes.append(StoredPrefix(path, owner, list(prefix.tokens)))

    def _find(self, tenant: str, prompt: Sequence[int]) -> StoredPrefix | None:
        owner = _hash_tenant(tenant)
        with self._lock:
            own = [stored for stored in self._prefixes if stored.tenant == owner]
        return max(own, key=lambda s: common_prefix_length(s.tokens, prompt), default=None)

    def _read(self, stored: StoredPrefix) -> KVCache:
        """Return the cache of a text. Raises: OSError, SafetensorError, ValueError, KeyError."""
        with safe_open(stored.path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = file.metadata()
        if _sum_tensors(tensors) != int(facts["checksum"]):
            raise ValueError("its bytes are not those that were stored")
        n_tokens = len(stored.tokens)
        cache = self.model.new_cache(1, round_slots(n_tokens))
        for layer in range(len(cache.keys)):
            if f"key.{layer}" in tensors:
                pair = tensors[f"key.{layer}"], tensors[f"value.{layer}"]
                key, value = (tensor.to(self.model.spec.device) for tensor in pair)
                keys, values = cache.get_buffers(layer, key, value)
                keys[:, :, :n_tokens], values[:, :, :n_tokens] = key, value
        cache.length = n_tokens
        return cache

    def _free(self, n_bytes: int) -> None:
        """Remove files, those used longest ago first, until so many bytes more may be stored."""
        files = sorted(
            ((path.stat().st_mtime, path.stat().st_size, path) for path in self._list_files()),
            key=lambda file: file[0],
        )
        total = sum(size for _, size, _ in files) + n_bytes
        for _, size, path in files:
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            with self._lock:
                self._prefixes = [stored for stored in self._prefixes if stored.path != path]
            total -= size

    def _list_files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if SUFFIX in path.name]

    def _remove(self, stored: StoredPrefix) -> None:
        with suppress(OSError):
            stored.path.unlink(missing_ok=True)
        with self._lock, suppress(ValueError):
            self._prefixes.remove(stored)


def _hash_tenant(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()


def _sum_tensors(tensors: dict[str, Tensor]) -> int:
    """Return a checksum of the bytes and shapes of tensors, whatever their order."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, checksum)
    return checksum
