"""Write a GGUF file's model as a folder in bfloat16, whole or with some of its layers.

For comparisons of draft models: a larger model that is not quantised, and a depth-pruned copy.

    python tests/benchmarks/write_folder.py FILE.gguf --out build/whole
    python tests/benchmarks/write_folder.py FILE.gguf --out build/pruned --layers 0-6,21-27
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import skipsearch as ss


def parse_layers(text: str) -> list[int]:
    """Return the numbers of `0-6,21-27`."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [i for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]


def keep_layers(model: Any, kept: list[int]) -> None:
    """Remove all other layers from a model of transformers."""
    config = model.config
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--layers", type=parse_layers, help="such as 0-6,21-27; default: all")
    args = parser.parse_args()
    adapter: Any = ss.load_model(args.file, device="cpu", dtype="bfloat16", engine="hf")
    model = adapter.model
    if args.layers is not None:
        keep_layers(model, args.layers)
    model.save_pretrained(args.out)
    adapter.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
