"""An unmeasured profile of the embedded model, as a file."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "profile" / "golden"


def write_demo_profile(path: Path, attn: str = "[5, 6]", mlp: str = "[5, 6]") -> Path:
    """Written to `path`, folders made; attn and mlp as YAML."""
    text = (GOLDEN / "v3_unmeasured.yaml").read_text()
    for old, new in (
        ("meta-llama/Llama-2-13b-hf", "demo"),
        ("n_layers: 40", "n_layers: 20"),
        ("attn: [10, 11], mlp: [12, 39]", f"attn: {attn}, mlp: {mlp}"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
