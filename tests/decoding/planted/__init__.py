"""Mistakes that decoders of this kind have been shipped with, planted into the real code one at a
time. A file a subject.

Each is a context manager. `BUGS` names the check that has to fail while it lasts; all checks pass
without it. To add one: a context manager under `@caught_by`, in the file of its subject."""

from importlib import import_module
from pkgutil import iter_modules

from .register import BUGS, Check

for _subject in iter_modules(__path__):
    import_module(f"{__name__}.{_subject.name}")  # which enters what it plants

CHECKS = {check.__name__: check for _, check in BUGS.values()}

__all__ = ["BUGS", "CHECKS", "Check"]
