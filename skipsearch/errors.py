"""Everything skipsearch raises on purpose. Each message names the value, the rule it broke and the
way out.

    SkipSearchError
    ├── MaskError        a mask that no such model can have
    ├── ModelError       a model that cannot be found, loaded or (ForeignForward) driven exactly
    ├── TaskError        a task manifest or its text
    ├── ProfileError     a profile file, or a profile used with something it was not made for
    ├── DecodeError      a generation request that makes no sense, or (NotCarriedOut) one that
    transformers alone carries out
    ├── SearchError      a search that cannot start, go on or be resumed
    ├── ModuleError      a trained part of a draft: its file, its training, or a model that it was
    not made for
    └── ExportError      a draft that has no form in another format, or no room

What is worth saying and stops nothing is a warning: UntrustedFolder, OtherEngine, SpinningThreads.
"""


class SkipSearchError(Exception):
    """The root: catch this to catch everything that skipsearch raises on purpose."""


class MaskError(SkipSearchError, ValueError):
    """A mask names sub-layers that its model does not have."""


class ModelError(SkipSearchError):
    """A model cannot be found, loaded, or driven without changing its output."""


class TaskError(SkipSearchError):
    """A task's manifest or text cannot be used."""


class ProfileError(SkipSearchError):
    """A profile cannot be read, or does not belong to this model."""


class DecodeError(SkipSearchError, ValueError):
    """A generation request cannot be carried out as asked."""


class UnsupportedRequest(DecodeError):
    """transformers' generate would carry this request out, and this decoder does not:
    `fallback=True` hands it over.
    """


class ForeignForward(ModelError, UnsupportedRequest):
    """A model in memory computes something that this decoder would not: `fallback=True` hands its
    requests over.
    """


class SearchError(SkipSearchError):
    """A search cannot start, go on, or be resumed."""


class ModuleError(SkipSearchError):
    """A trained part of a draft cannot be read, made, or used with this model."""


class ExportError(SkipSearchError):
    """A draft has no form in the format asked for, or cannot be written."""


class UntrustedCacheWarning(UserWarning):
    """Compiled code in a folder that others may write to is not run."""


class EngineFallbackWarning(UserWarning):
    """The engine that was asked for cannot be had here, and another one takes its place."""


class SpinningThreads(UserWarning):
    """Idle threads of torch take the cores from those of the engine native, which makes drafting
    slow.
    """


def non_finite_logits() -> ModelError:
    """Said at load as well as while decoding."""
    return ModelError(
        "the model's logits are not numbers (NaN or infinite), so no token can be chosen from "
        "them: its weights are damaged, "
        "or overflow in this dtype; check the files, or load it with --dtype bfloat16 or float32"
    )
