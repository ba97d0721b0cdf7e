"""`skipsearch bench`: side by side, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.options import Device, Dtype, Engine, Json, Quantization, Threads, model_of, open_model, require, warn


def bench(profile: Annotated[Path | None, typer.Option(help="A profile to take part; its model is used.")] = None,
          model: Annotated[str | None, typer.Option(help="Which model, without a profile.")] = None,
          task: Annotated[str | None, typer.Option(help="Whose hold-out prompts; the profile's own task, or pycode.")] = None,
          peers: Annotated[str | None, typer.Option(help="Comma-separated: plain, profile, hf-generate. Default: all that can.")] = None,
          prompts: Annotated[int, typer.Option(min=1, help="Hold-out prompts.")] = 16,
          repeats: Annotated[int, typer.Option(min=1, help="Turns of each peer on each prompt.")] = 3,
          device: Device = "auto", dtype: Dtype = "auto", quantization: Quantization = None, engine: Engine = "auto",
          threads: Threads = None, as_json: Json = False) -> None:
    """Example: skipsearch bench --profile my-profile.yaml

    Greedy decoding of a task's hold-out prompts by this engine plain, with a profile, and by Hugging Face's generate: interleaved in one
    run, with ratios paired by prompt. Speed is that of tokens behind the first.
    """
    require(profile is not None or model is not None, "give --profile FILE or --model M")
    from rich.progress import Progress
    from rich.table import Table

    from skipsearch.bench import bench as run
    from skipsearch.bench import make_peers
    from skipsearch.cli.common import err, out, print_json
    from skipsearch.evaluation.prompts import shortened, workload
    from skipsearch.profile import load_profile
    from skipsearch.tasks import load_task

    loaded = load_profile(profile) if profile else None
    name = task or (loaded.task.name if loaded else "pycode")
    chosen = load_task(name)
    warn([*chosen.notes])
    adapter = open_model(model or (model_of(loaded) if loaded else ""), device, dtype, engine, threads, quantization)
    warn(shortened(chosen, adapter.spec))
    names = peers.split(",") if peers else ["plain", *(["profile"] if loaded else []), "hf-generate"]
    contenders = make_peers([n.strip() for n in names], adapter, loaded)
    with Progress(console=err, disable=not err.is_terminal, transient=True) as bar:
        running = bar.add_task("decoding", total=None)
        rows = run(adapter, contenders, workload(adapter, chosen, chosen.holdout[:prompts]), repeats,
                   lambda done, total: bar.update(running, completed=done, total=total))
    if as_json:
        print_json({"model": adapter.spec.id, "task": name, "rows": [row.as_dict() for row in rows]})
        return
    table = Table("peer", "ms/token", "quartiles", f"× {rows[0].peer}", "95 %", "first token", "tokens/s with prefill", "τ", "α",
                  "identical", box=None, pad_edge=False)
    for r in rows:
        table.add_row(r.peer, f"{r.ms_per_token:.2f}", f"{r.ms_per_token_quartiles[0]:.2f}–{r.ms_per_token_quartiles[1]:.2f}",
                      f"{r.speedup.mean:.2f}", f"{r.speedup.low:.2f}–{r.speedup.high:.2f}", f"{r.first_token_ms:.0f} ms",
                      f"{r.end_to_end_tokens_per_second:.0f}", f"{r.tau:.2f}" if r.tau else "", f"{r.alpha:.2f}" if r.alpha else "",
                      f"{r.identical} of {r.prompts}")
    out.print(table)
