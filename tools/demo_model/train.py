"""Trains the embedded model: a small Llama whose layers are made to be skipped.

    python -m tools.demo_model.train --corpus corpus/ --out model/ [--layers 20] [--steps 4000]
    [--device cuda]

Recipe: Muon (Jordan et al. 2024, torch's own) for the matrices of the layers and AdamW for the
embedding and the norms; warm-up, constant rate, linear decay over the second half. LayerDrop (Fan
et al. 2019) for attention and MLP apart: a sequence draws a severity, none for a third of them, and
loses each sub-layer with a probability that rises with depth up to severity × `--drop`; the whole
range from full depth to a very thin model is thus trained, which is what makes masks good drafts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model.corpus import END_OF_TEXT


def make_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        head_dim=64,
        max_position_embeddings=args.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def run_layer(layer: Any, h: Tensor, keep: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One layer with `keep` [B, 2] (0 or 1) multiplying its two residual branches. h: [B, T, H]."""
    branch, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(h), position_embeddings=(cos, sin), attention_mask=None
    )
    h = h + keep[:, 0, None, None] * branch
    return h + keep[:, 1, None, None] * layer.mlp(layer.post_attention_layernorm(h))


def token_losses(model: LlamaForCausalLM, h: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        model.lm_head(model.model.norm(h)).float().flatten(0, 1), targets.flatten()
    )


class Trainable:
    """The model with its two heavy pieces compiled once each, whatever the number of layers."""

    def __init__(self, model: LlamaForCausalLM, compiled: bool):
        self.model = model
        self.layer = torch.compile(run_layer, dynamic=False) if compiled else run_layer
        self.losses = torch.compile(token_losses, dynamic=False) if compiled else token_losses

    def residual_stream(self, inputs: Tensor, keep: Tensor) -> Tensor:
        """Residual stream behind the last layer, [B, T, H]. inputs: [B, T]; keep: [B, L, 2]."""
        h = self.model.model.embed_tokens(inputs)
        positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
        cos, sin = self.model.model.rotary_emb(h, positions)
        for i, layer in enumerate(self.model.model.layers):
            h = self.layer(layer, h, keep[:, i], cos, sin)
        return h

    def loss(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Mean next-token loss in nats. tokens: [B, T + 1]; keep: [B, L, 2]."""
        return self.losses(self.model, self.residual_stream(tokens[:, :-1], keep), tokens[:, 1:])


def draw_keep(batch: int, layers: int, drop: float, generator: torch.Generator) -> Tensor:
    """[B, L, 2] of 0/1: the severity is drawn for a sequence, the sub-layers independently given
    it.
    """
    severity = torch.rand(batch, 1, 1, generator=generator) * (
        torch.rand(batch, 1, 1, generator=generator) > 1 / 3
    )
    depth = torch.arange(1, layers + 1)[None, :, None] / layers
    return (torch.rand(batch, layers, 2, generator=generator) >= severity * drop * depth).float()


def make_optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers." in n)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_at(step: int, steps: int) -> float:
    """Share of the peak rate: warm-up over 100 steps, constant, linear to 2 % over the second
    half.
    """
    return min(1.0, (step + 1) / 100, max(0.02, 2 * (steps - step) / steps))


@torch.no_grad()
def heldout_loss(
    trainable: Trainable, heldout: np.ndarray, context: int, batch: int, device: str
) -> float:
    layers = trainable.model.config.num_hidden_layers
    rows = min(len(heldout) // (context + 1), 2 * batch) // batch * batch
    data = (
        torch.from_numpy(heldout[: rows * (context + 1)].astype(np.int64))
        .view(rows, context + 1)
        .to(device)
    )
    keep = torch.ones(batch, layers, 2, device=device)
    with torch.autocast(device, torch.bfloat16):
        return float(
            sum(trainable.loss(data[i : i + batch], keep) for i in range(0, rows, batch))
            / (rows // batch)
        )


def train_demo_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokens = np.fromfile(args.corpus / "train.bin", dtype=np.uint16)
    heldout = np.fromfile(args.corpus / "heldout.bin", dtype=np.uint16)
    model = LlamaForCausalLM(make_config(args)).to(args.device)
    with (
        torch.no_grad()
    ):  # residual branches start at zero: every depth is the same model at step 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    trainable = Trainable(model, args.device == "cuda")
    opts = make_optimizers(model, args.rate)
    schedule = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: rate_at(s, args.steps)) for o in opts
    ]
    generator = torch.Generator().manual_seed(args.seed)
    window = np.arange(args.context + 1)
    started = time.time()
    for step in range(args.steps):
        starts = torch.randint(
            len(tokens) - args.context - 1, (args.batch,), generator=generator
        ).numpy()
        batch = torch.from_numpy(tokens[starts[:, None] + window].astype(np.int32))
        keep = draw_keep(args.batch, args.layers, args.drop, generator)
        with torch.autocast(args.device, torch.bfloat16):
            loss = trainable.loss(
                batch.to(args.device, non_blocking=True).long(), keep.to(args.device)
            )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, sched in zip(opts, schedule, strict=True):
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == args.steps - 1:
            seen = (step + 1) * args.batch * args.context
            held = heldout_loss(trainable, heldout, args.context, min(args.batch, 32), args.device)
            print(
                f"{time.time() - started:.0f} s: {args.layers} layers, step {step}: loss "
                f"{loss.item():.3f}, "
                f"held out at full depth {held:.3f}, "
                f"{seen / 1e6:.0f} M tokens, {seen / (time.time() - started) / 1e3:.0f} k/s",
                flush=True,
            )
            if not math.isfinite(held):
                raise SystemExit("the loss is not finite: lower --rate")
        if args.seconds and time.time() - started > args.seconds and step < args.steps // 2:
            raise SystemExit(
                f"only {step} of {args.steps} steps done after {args.seconds} s: lower --steps"
            )
    return model


def save_demo_model(model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    PreTrainedTokenizerFast(
        tokenizer_file=str(args.corpus / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token="<|pad|>",
        model_max_length=args.context,
    ).save_pretrained(args.out)
    recipe = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(args).items()
        if k not in {"corpus", "out", "log_every"}
    }
    (args.out / "recipe.json").write_text(
        json.dumps(recipe | {"torch": torch.__version__}, indent=1) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="what tools.demo_model.corpus wrote"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--mlp", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--drop", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="give up at half-time if the steps cannot be done in this",
    )
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    save_demo_model(train_demo_model(args), args)


if __name__ == "__main__":
    main()
