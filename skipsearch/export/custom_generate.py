"""`custom-generate`: a folder that transformers' `generate` takes, for users who have skipsearch installed and nothing of this profile."""

from __future__ import annotations

from pathlib import Path

from skipsearch.errors import ExportError
from skipsearch.profile import Profile, dump_profile
from skipsearch.profile.describe import describe

CUSTOM_GENERATE = "custom-generate"

_CODE = '''\
"""Drafts and verifies with skipsearch; the tokens are those of the model's own generate. Written by `skipsearch export`."""

PROFILE = {profile!r}


def generate(model, input_ids=None, inputs=None, **asked):
    """As transformers' generate, whose arguments it takes. What skipsearch does not carry out is refused by name."""
    try:
        import skipsearch
        from skipsearch.profile.load import parse_profile
    except ImportError:
        raise ImportError("this custom_generate folder needs skipsearch: pip install skipsearch") from None
    optional = {{"generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
                "streamer", "negative_prompt_ids", "negative_prompt_attention_mask"}}
    asked = {{name: value for name, value in asked.items() if value is not None or name not in optional}}
    profile = parse_profile(PROFILE.encode(), "the profile of this folder")
    return skipsearch.generate(model, input_ids, profile, inputs=inputs, **asked)
'''
_README = """\
---
tags:
- custom_generate
---

# Drafting for {id}

`custom_generate/generate.py` holds a profile of skipsearch, and hands transformers' arguments to it:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{where}")
model = AutoModelForCausalLM.from_pretrained("{where}", dtype="auto")
inputs = tokenizer("…", return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=64, custom_generate="{name}", trust_remote_code=True)
```

`trust_remote_code=True` lets transformers run that file, which is short: read it. skipsearch has to be installed.

    {described}
"""


def _where(model: str) -> str:
    """What transformers loads it by: a Hub id, or for a model of one's own a path, which a folder that is handed on cannot know."""
    return model if "/" in model else f"path/to/{model}"


def write_custom_generate(profile: Profile, folder: Path, name: str) -> None:
    """Fill a new folder. name: what it will be called.

    Raises: ExportError for a recipe with trained parts, which are files of their own.
    """
    trained = next((drafter.kind for drafter in profile.recipe.drafters if drafter.modules), None)
    if trained is not None:
        raise ExportError(f"the drafter {trained} of this profile has trained weights, which such a folder does not carry: use the profile "
                          "with skipsearch.attach, or tune one with --drafters lookup, skip or lookup,skip")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(_CODE.format(profile=dump_profile(profile)), "utf-8")
    (folder / "README.md").write_text(
        _README.format(id=profile.model.id, where=_where(profile.model.id), name=name, described="\n    ".join(describe(profile))), "utf-8")
