"""`attach`: make `model.generate` itself draft, for pipelines and other code that calls it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.decoding.validation import profile_type_error
from skipsearch.errors import ModelError, ProfileError
from skipsearch.integrations.decoder_cache import evict_decoders
from skipsearch.integrations.hf_generate import generate
from skipsearch.profile import Profile


def attach(
    model: nn.Module,
    profile: Profile | Recipe | SkipMask,
    fallback: bool = True,
    *,
    exact: bool = False,
    draft_model: nn.Module | None = None,
) -> None:
    """Make `model.generate(…)` draft as `profile` says, until `detach`.

    The model's weights and modules stay as they are. A copy of the model (`copy.deepcopy`,
    `torch.save`) is attached as well, and runs its own weights.
    fallback: pass what this decoder does not support to transformers' own generate; with False it
        is refused by name.
    exact, draft_model: as in `generate`.

    Raises: ModelError for an object that is no Hugging Face model, ProfileError for one that is no
        profile.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        raise ModelError(
            f"a {type(model).__name__} is not a Hugging Face model with a generate method: give an "
            "AutoModelForCausalLM"
        )
    if not isinstance(profile, Profile | Recipe | SkipMask):
        raise (
            profile_type_error(profile)
            if profile is not None
            else ProfileError("attach needs a profile: skipsearch.load_profile(path)")
        )
    model.__dict__["generate"] = _Attached(model, profile, fallback, exact, draft_model)


class _Attached:
    """transformers' `generate`, with drafting; `skipsearch.detach(model)` undoes it.

    It has only a weak reference to the model. With a strong one, the model would reference itself
    and stay in memory until the garbage collector runs. A copy or a pickle of this object includes
    the model, so the copy is attached to the copied model.
    """

    def __init__(self, model: nn.Module, *settings: Any):
        self._model, self._settings = weakref.ref(model), settings

    def __reduce__(self) -> tuple[Any, ...]:
        return _Attached, (self._own(), *self._settings)

    def __call__(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: Any = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Any = None,
        negative_prompt_attention_mask: Any = None,
        custom_generate: Any = None,
        **settings: Any,
    ) -> Any:
        """Take the arguments of transformers' `generate`, in its order."""
        positional = {
            "logits_processor": logits_processor,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "assistant_model": assistant_model,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": custom_generate,
        }
        profile, fallback, exact, draft_model = self._settings
        return generate(
            self._own(),
            profile=profile,
            inputs=inputs,
            generation_config=generation_config,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            fallback=fallback,
            exact=exact,
            draft_model=draft_model,
            **settings,
            **{name: value for name, value in positional.items() if value is not None},
        )

    def _own(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ModelError(
                "the model that this generate was attached to is gone: hold on to it while it is "
                "called"
            )
        return model


def detach(model: nn.Module) -> None:
    """Restore the model's own `generate` and drop its cached decoders.

    A model that was never attached stays as it is.
    """
    model.__dict__.pop("generate", None)
    evict_decoders(model)
