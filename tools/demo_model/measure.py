"""Figures for the embedded model's card: is depth worth something, and does greedy text loop?

    python -m tools.demo_model.measure --corpus corpus/ --model model/ [--half half-depth-model/]

Prints one JSON object: held-out loss of the full model, of its best half-depth mask (backward
elimination, chosen on one half of the held-out text and measured on the other), of a half-depth
model of the same recipe; and the length of greedy text before its first repeated 6-gram, beside the
same length in the real continuations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from skipsearch.decoding.repetition import find_first_repeat
from tools.demo_model.train import Trainable

NGRAM = 6


class HeldOutLoss:
    """Held-out loss of a model under a mask, on 1024-token rows."""

    def __init__(self, folder: Path, device: str):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.model, self.device = Trainable(model, compiled=False), device
        self.layers = model.config.num_hidden_layers

    @torch.no_grad()
    def __call__(self, rows: Tensor, keep: Tensor) -> float:
        """rows: [N, T + 1]; keep: [L, 2] of 0/1, or [M, L, 2] for M masks in one call."""
        chunks = [
            self.model.loss(r.to(self.device), keep.expand(len(r), -1, -1).to(self.device))
            for r in rows.split(16)
        ]
        return float(sum(chunks) / len(chunks))

    def best_half_mask(self, rows: Tensor) -> Tensor:
        """Backward elimination down to half the sub-layers, each step the removal that hurts least
        on `rows`.
        """
        keep = torch.ones(self.layers, 2)
        for _ in range(self.layers):
            options = []
            for i, kind in torch.nonzero(keep).tolist():
                trial = keep.clone()
                trial[i, kind] = 0
                options.append((self(rows, trial), i, kind))
            _, i, kind = min(options)
            keep[i, kind] = 0
        return keep


@torch.no_grad()
def measure_greedy_lengths(
    folder: Path, heldout: Tensor, device: str, prompt: int = 64, length: int = 128
) -> dict[str, float]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    rows = (
        heldout[: (len(heldout) // (prompt + length)) * (prompt + length)]
        .view(-1, prompt + length)[:256]
        .to(device)
    )
    out = model.generate(
        rows[:, :prompt],
        attention_mask=torch.ones_like(rows[:, :prompt]),
        do_sample=False,
        max_new_tokens=length,
        min_new_tokens=length,
    )[:, prompt:]
    greedy = [find_first_repeat(r, NGRAM) or length for r in out.tolist()]
    real = [find_first_repeat(r, NGRAM) or length for r in rows[:, prompt:].tolist()]
    return {
        "prompts": len(greedy),
        "greedy_mean": float(np.mean(greedy)),
        "greedy_median": float(np.median(greedy)),
        "greedy_ended_on_repeat": float(np.mean(np.array(greedy) < length)),
        "real_text_mean": float(np.mean(real)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--half", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    heldout = torch.from_numpy(
        np.fromfile(args.corpus / "heldout.bin", dtype=np.uint16).astype(np.int64)
    )
    rows = heldout[: len(heldout) // 513 * 513].view(-1, 513)
    select, measure = rows[: args.rows], rows[args.rows : 5 * args.rows]
    losses = HeldOutLoss(args.model, args.device)
    full, half = torch.ones(losses.layers, 2), losses.best_half_mask(select)
    result = {
        "heldout_loss": losses(measure, full),
        "best_half_mask_loss": losses(measure, half),
        "best_half_mask": {
            "attn": torch.nonzero(half[:, 0] == 0).flatten().tolist(),
            "mlp": torch.nonzero(half[:, 1] == 0).flatten().tolist(),
        },
    }
    if args.half:
        shallow = HeldOutLoss(args.half, args.device)
        result["half_depth_model_loss"] = shallow(measure, torch.ones(shallow.layers, 2))
    result["first_repeat"] = measure_greedy_lengths(args.model, heldout, args.device)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
