"""Second phase of the embedded model's training: drafts that agree with the whole, and greedy text
that does not loop.

    python -m tools.demo_model.distill --corpus corpus/ --model base/ --out model/ [--steps 1200]
    [--device cuda]

Each step adds three losses: next-token cross-entropy at full depth; the divergence of a randomly
thinned pass from the full pass of the same text (self-distillation, the full pass being the teacher
that learns nothing from it); and, every `--every` steps, unlikelihood (Welleck et al. 2020) of the
tokens with which the model's own greedy continuations repeat a 6-gram."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from skipsearch.decoding.repetition import RepeatDetector
from tools.demo_model.train import Trainable, heldout_loss, make_optimizers, save_demo_model


class Distilled(Trainable):
    """Adds the loss of the second phase, compiled like the other pieces."""

    def __init__(self, model: LlamaForCausalLM, compiled: bool):
        super().__init__(model, compiled)
        self.divergence = torch.compile(divergence, dynamic=False) if compiled else divergence

    def hidden(self, inputs: Tensor, keep: Tensor) -> Tensor:
        """What the head reads: the residual stream behind the final norm, [B, T, H]."""
        return self.model.model.norm(self.residual_stream(inputs, keep))


def divergence(
    model: LlamaForCausalLM, full: Tensor, thin: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """(cross-entropy of the full pass, KL(full ‖ thin) with the full pass fixed). full, thin:
    normalised hidden [B, T, H].
    """
    full_logits, thin_logits = model.lm_head(full).float(), model.lm_head(thin).float()
    teacher = full_logits.detach().log_softmax(-1)
    kl = (teacher.exp() * (teacher - thin_logits.log_softmax(-1))).sum(-1).mean()
    return F.cross_entropy(full_logits.flatten(0, 1), targets.flatten()), kl


def mark_repeats(rows: list[list[int]], n: int = 6) -> Tensor:
    """[B, T] 1 where a token completes an n-gram that its row has already held."""
    marks = []
    for row in rows:
        detector = RepeatDetector(n)
        marks.append([float(detector.push_token(token)) for token in row])
    return torch.tensor(marks)


def unlikelihood_loss(student: Distilled, prompts: Tensor, length: int) -> tuple[Tensor, float]:
    """Mean −log(1 − p) of repeating tokens in greedy continuations of prompts [B, P], and the share
    of tokens that repeat.
    """
    model = student.model
    with torch.no_grad():
        rows = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
        )
    marks = mark_repeats(rows[:, prompts.shape[1] :].tolist()).to(rows.device)
    keep = torch.ones(len(rows), model.config.num_hidden_layers, 2, device=rows.device)
    h = student.hidden(rows[:, :-1], keep)[:, prompts.shape[1] - 1 :]
    p = model.lm_head(h).float().softmax(-1).gather(-1, rows[:, prompts.shape[1] :, None])[..., 0]
    return -(torch.log1p(-p.clamp(max=1 - 1e-4)) * marks).sum() / marks.sum().clamp(min=1), float(
        marks.mean()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--drop", type=float, default=0.9)
    parser.add_argument("--distill", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--unlikelihood", type=float, default=0.5)
    parser.add_argument("--rollouts", type=int, default=384)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="wind down so that training ends after about this long",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokens = np.fromfile(args.corpus / "train.bin", dtype=np.uint16)
    heldout = np.fromfile(args.corpus / "heldout.bin", dtype=np.uint16)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
    polished, layers = Distilled(model, args.device == "cuda"), model.config.num_hidden_layers
    opts = make_optimizers(model, args.rate)
    generator = torch.Generator().manual_seed(args.seed)
    depth = torch.arange(1, layers + 1)[None, :, None] / layers
    ones = torch.ones(args.batch, layers, 2, device=args.device)
    started, step = time.time(), 0
    while step < args.steps:
        left = 1 - max(step / args.steps, (time.time() - started) / args.seconds)
        if left <= 0:
            break
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.rate * min(1.0, (step + 1) / 20) * max(0.02, left)
        starts = torch.randint(
            len(tokens) - args.context - 1, (args.batch,), generator=generator
        ).numpy()
        batch = torch.from_numpy(
            tokens[starts[:, None] + np.arange(args.context + 1)].astype(np.int64)
        ).to(args.device)
        severity = 0.3 + 0.7 * torch.rand(args.batch, 1, 1, generator=generator)
        keep = (
            (torch.rand(args.batch, layers, 2, generator=generator) >= severity * args.drop * depth)
            .float()
            .to(args.device)
        )
        with torch.autocast(args.device, torch.bfloat16):
            full, thin = polished.hidden(batch[:, :-1], ones), polished.hidden(batch[:, :-1], keep)
            ce, kl = polished.divergence(model, full, thin, batch[:, 1:])
            loss, note = ce + args.distill * kl, ""
            if step % args.every == 0:
                prompts = (
                    batch[:, :-1].reshape(-1, 64)[: args.rollouts]
                    if args.rollouts
                    else batch[:, :64]
                )
                ul, share = unlikelihood_loss(polished, prompts, args.length)
                loss, note = (
                    loss + args.unlikelihood * ul,
                    f", unlikelihood {ul.item():.3f} on {share:.1%} of tokens",
                )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if step % (10 * args.every) == 0:
            held = heldout_loss(polished, heldout, args.context, min(args.batch, 32), args.device)
            print(
                f"{time.time() - started:.0f} s, step {step}: loss {ce.item():.3f}, divergence "
                f"{kl.item():.3f}, "
                f"held out {held:.3f}{note}",
                flush=True,
            )
        step += 1
    recipe = args.model / "recipe.json"
    first = json.loads(recipe.read_text()) if recipe.is_file() else {}
    save_demo_model(model, args)
    polish = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(args).items()
        if k not in {"corpus", "model", "out"}
    } | {"steps": step}
    (args.out / "recipe.json").write_text(
        json.dumps({"train": first, "polish": polish}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
