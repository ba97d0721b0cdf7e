"""An exported draft at work: transformers' own assisted generation writes with it what it writes
without.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skipsearch.core.mask import SkipMask
from skipsearch.export import export_draft
from skipsearch.models.loading.hub import DEMO_FOLDER

from .drafts import profile_for

MASK = SkipMask.from_layers(20, (6, 9, 12, 14))
PROMPTS = (
    "def parse_arguments(argv=None):",
    "import os\n\n\nclass Folder:\n    def __init__(self",
    "    for name in sorted(",
)
NEW_TOKENS, DRAFT_LENGTH = 40, 5


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "draft"
    export_draft(profile_for("demo", "llama", MASK), "demo", folder)
    return folder


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.mark.thorough
def test_assisted_generation_writes_what_the_model_writes_alone_in_fewer_passes(
    draft_folder: Path,
) -> None:
    model, draft = loaded(DEMO_FOLDER), loaded(draft_folder)
    draft.generation_config.num_assistant_tokens = DRAFT_LENGTH
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    tokenizer = AutoTokenizer.from_pretrained(draft_folder)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        counting, passes = model.register_forward_hook(count), 0
        assisted = model.generate(
            **inputs, assistant_model=draft, do_sample=False, max_new_tokens=NEW_TOKENS
        )
        counting.remove()
        assert assisted.tolist() == alone.tolist()
        emitted = assisted.shape[1] - inputs["input_ids"].shape[1]
        assert emitted / (DRAFT_LENGTH + 1) < passes < emitted, (
            "some drafts were accepted, and not all"
        )


@pytest.mark.thorough
def test_the_transformers_lines_of_its_readme_run_as_they_stand(draft_folder: Path) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (draft_folder / "README.md").read_text(), re.DOTALL
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=draft_folder.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("def main(argv=None):")
