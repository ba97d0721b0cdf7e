"""Bugs that decoders of this kind have had, planted into the real code one at a time.

Each file has one subject. Each bug is a context manager. `BUGS` names the check that must fail
within it; all checks pass without it. To add a bug, write a context manager under `@caught_by` in
the file of its subject.
"""

from importlib import import_module
from pkgutil import iter_modules

from .register import BUGS, Check

for _subject in iter_modules(__path__):
    import_module(f"{__name__}.{_subject.name}")  # it registers its bugs

CHECKS = {check.__name__: check for _, check in BUGS.values()}

__all__ = ["BUGS", "CHECKS", "Check"]
