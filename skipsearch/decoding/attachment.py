"""`attach`: from then on `model.generate` itself drafts, for pipelines and whatever else calls it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from skipsearch.decoding.arguments import wrong_profile
from skipsearch.decoding.dropin import generate
from skipsearch.decoding.keeping import let_go
from skipsearch.errors import ModelError, ProfileError
from skipsearch.mask import SkipMask
from skipsearch.profile import Profile
from skipsearch.recipe import Recipe


def attach(model: nn.Module, profile: Profile | Recipe | SkipMask, fallback: bool = True) -> None:
    """Have `model.generate(…)` draft as `profile` says, until `detach`. The model's weights and modules stay as they are.

    fallback: what this decoder does not carry out is handed to transformers' own generate; with False it is refused by name.
    Raises: ModelError for what is no Hugging Face model, ProfileError for what is no profile.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        raise ModelError(f"a {type(model).__name__} is not a Hugging Face model with a generate method: give an AutoModelForCausalLM")
    if not isinstance(profile, Profile | Recipe | SkipMask):
        raise wrong_profile(profile) if profile is not None else ProfileError("attach needs a profile: skipsearch.load_profile(path)")

    found = weakref.ref(model)   # a model that held itself would stay in memory until the garbage collector runs

    def attached(inputs: Any = None, generation_config: Any = None, logits_processor: Any = None, stopping_criteria: Any = None,
                 prefix_allowed_tokens_fn: Any = None, synced_gpus: Any = None, assistant_model: Any = None, streamer: Any = None,
                 negative_prompt_ids: Any = None, negative_prompt_attention_mask: Any = None, custom_generate: Any = None,
                 **settings: Any) -> Any:
        """transformers' `generate`, drafting; `skipsearch.detach(model)` undoes it."""
        positional = {"logits_processor": logits_processor, "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
                      "synced_gpus": synced_gpus, "assistant_model": assistant_model, "negative_prompt_ids": negative_prompt_ids,
                      "negative_prompt_attention_mask": negative_prompt_attention_mask, "custom_generate": custom_generate}
        own = found()
        if own is None:
            raise ModelError("the model that this generate was attached to is gone: hold on to it while it is called")
        return generate(own, profile=profile, inputs=inputs, generation_config=generation_config, stopping_criteria=stopping_criteria,
                        streamer=streamer, fallback=fallback, **settings,
                        **{name: value for name, value in positional.items() if value is not None})

    model.__dict__["generate"] = attached


def detach(model: nn.Module) -> None:
    """Give the model its own `generate` back, and let go of what was kept for drafting; one that was never attached stays as it is."""
    model.__dict__.pop("generate", None)
    let_go(model)
