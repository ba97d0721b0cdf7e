"""The tests of this folder can fail: each mistake, planted into the real code, is found by the check that is there for it."""

from __future__ import annotations

import pytest

from skipsearch.errors import ModelError

from .planted import BUGS, Check

CHECKS = {check.__name__: check for _, check in BUGS.values()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_passes_on_the_code_as_it_is(check: Check) -> None:
    check()


@pytest.mark.parametrize("bug", BUGS)
def test_a_check_fails_while_the_bug_is_planted(bug: str) -> None:
    plant, check = BUGS[bug]
    with plant(), pytest.raises((AssertionError, ModelError)):
        check()
