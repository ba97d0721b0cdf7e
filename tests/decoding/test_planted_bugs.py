"""The tests of this folder can fail: the check of each planted bug finds it."""

from __future__ import annotations

import pytest
from helpers.marks import thorough

from skipsearch.errors import ModelError

from .planted import BUGS, CHECKS, Check

# Thousands of samples each; `make test` leaves them to `make thorough`.
OF_SAMPLES = (
    "check_choosing",
    "check_tree_sampling",
    "check_s3d_tree_sampling",
    "check_sampling_of_likely_tokens",
    "check_certain_sampling",
)


# Other tests run these checks, too.
@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_passes_on_the_code_as_it_is(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    "bug",
    [
        *(bug for bug, (_, check) in BUGS.items() if check.__name__ not in OF_SAMPLES),
        *thorough(*(bug for bug, (_, check) in BUGS.items() if check.__name__ in OF_SAMPLES)),
    ],
)
def test_a_check_fails_while_the_bug_is_planted(bug: str) -> None:
    plant, check = BUGS[bug]
    with plant(), pytest.raises((AssertionError, ModelError)):
        check()
