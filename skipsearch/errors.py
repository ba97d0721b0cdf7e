"""The errors that skipsearch raises on purpose.

Each message names the value, the rule that it broke, and the way out.

    SkipSearchError
    ├── MaskError        a mask that no such model can have
    ├── ModelError       a model that cannot be found, loaded or (ForeignForward) run exactly
    ├── TaskError        a task manifest or its text
    ├── ProfileError     a profile file, or a profile used with something it was not made for
    ├── DecodeError      a request that makes no sense, or (UnsupportedRequest) that only
    │                    transformers supports
    ├── SearchError      a search that cannot start, continue or be resumed
    ├── ModuleError      a module: its file, its training, or a model that it was not made for
    └── ExportError      a draft that has no form in another format, or that cannot be written

Warnings stop nothing: UntrustedCacheWarning, EngineFallbackWarning, UnpackedWeightsWarning,
UnusedWeightsWarning, TokenizerWarning, SpinningThreads.
"""


class SkipSearchError(Exception):
    """The base class of every error that skipsearch raises on purpose."""


class MaskError(SkipSearchError, ValueError):
    """A mask names sub-layers that its model does not have."""


class ModelError(SkipSearchError):
    """A model cannot be found, loaded, or run without changing its output."""


class TaskError(SkipSearchError):
    """A task's manifest or text cannot be used."""


class ProfileError(SkipSearchError):
    """A profile cannot be read, or does not belong to this model."""


class DecodeError(SkipSearchError, ValueError):
    """A generation request is not valid or not supported."""


class UnsupportedRequest(DecodeError):
    """transformers' generate supports a request that this decoder does not.

    `fallback=True` runs it with transformers.
    """


class ForeignForward(ModelError, UnsupportedRequest):
    """A model in memory computes something that this decoder would not.

    `fallback=True` runs its requests with transformers.
    """


class SearchError(SkipSearchError):
    """A search cannot start, continue, or be resumed."""


class ModuleError(SkipSearchError):
    """A module cannot be read, trained, or used with this model."""


class ExportError(SkipSearchError):
    """A draft has no form in the requested format, or cannot be written."""


class UntrustedCacheWarning(UserWarning):
    """Compiled code in a folder that others may write to is not run."""


class EngineFallbackWarning(UserWarning):
    """The requested engine is not available here, and another one is used."""


class UnpackedWeightsWarning(UserWarning):
    """Weights of a file have no kernel in their format, so more bytes are read for each token."""


class UnusedWeightsWarning(UserWarning):
    """A folder has weights besides those of the model, such as a value head; they are not used."""


class TokenizerWarning(UserWarning):
    """A tokenizer of a file is incomplete, so some texts may become other tokens."""


class SpinningThreads(UserWarning):
    """Idle threads of torch use the cores that the engine `native` needs, and drafting is slow."""


def non_finite_logits() -> ModelError:
    """Return the error of a model whose logits are not finite, for loading and for decoding."""
    return ModelError(
        "the model's logits are not numbers (NaN or infinite), so no token can be chosen from "
        "them: its weights are damaged, "
        "or overflow in this dtype; check the files, or load it with --dtype bfloat16 or float32"
    )
