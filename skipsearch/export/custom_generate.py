"""The format `custom-generate`: a folder that holds a profile for transformers' `generate`."""

from __future__ import annotations

from pathlib import Path

from skipsearch.errors import ExportError
from skipsearch.profile import Profile, dump_profile
from skipsearch.profile.show import describe_profile

CUSTOM_GENERATE = "custom-generate"

_CODE = '''\
"""Drafts and verifies with skipsearch; the tokens are those of the model's own generate.

Written by `skipsearch export`.
"""

PROFILE = {profile!r}
OPTIONAL = {{
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
}}


def generate(model, input_ids=None, inputs=None, **settings):
    """Take the arguments of transformers' generate; refuse by name what skipsearch cannot do."""
    try:
        import skipsearch
        from skipsearch.profile.load import parse_profile
    except ImportError:
        raise ImportError(
            "this custom_generate folder needs skipsearch: pip install skipsearch"
        ) from None
    settings = {{
        name: value
        for name, value in settings.items()
        if value is not None or name not in OPTIONAL
    }}
    profile = parse_profile(PROFILE.encode(), "the profile of this folder")
    return skipsearch.generate(model, input_ids, profile, inputs=inputs, **settings)
'''
_README = """\
---
tags:
- custom_generate
---

# Drafting for {id}

`custom_generate/generate.py` holds a profile of skipsearch, and passes transformers' arguments on:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{where}")
model = AutoModelForCausalLM.from_pretrained("{where}", dtype="auto")
inputs = tokenizer("…", return_tensors="pt")
out = model.generate(
    **inputs, max_new_tokens=64, custom_generate="{name}", trust_remote_code=True
)
```

`trust_remote_code=True` lets transformers run that file, which is short: read it.
skipsearch has to be installed.

    {described}
"""


def _model_argument(model: str) -> str:
    """Return the model's name for transformers: its Hub id, or a placeholder path."""
    return model if "/" in model else f"path/to/{model}"


def write_custom_generate(profile: Profile, folder: Path, name: str) -> None:
    """Write the format's files to `folder`. name: the final name of the folder.

    Raises: ExportError if the recipe has trained weights, which are separate files.
    """
    trained = next((drafter.kind for drafter in profile.recipe.drafters if drafter.modules), None)
    if trained is not None:
        raise ExportError(
            f"the drafter {trained} of this profile has trained weights, which such a folder does "
            "not carry: use the profile "
            "with skipsearch.attach, or tune one with --drafters lookup, skip or lookup,skip"
        )
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        _CODE.format(profile=dump_profile(profile)), "utf-8"
    )
    (folder / "README.md").write_text(
        _README.format(
            id=profile.model.id,
            where=_model_argument(profile.model.id),
            name=name,
            described="\n    ".join(describe_profile(profile)),
        ),
        "utf-8",
    )
