"""The tests of this folder can fail: the check of each planted bug finds it."""

from __future__ import annotations

import pytest
from helpers.marks import thorough

from skipsearch.errors import ModelError

from .planted import BUGS, CHECKS, Check

# A second or more for each bug; `make test` leaves them to `make thorough`.
LONG = {
    "check_batch",
    "check_batch_of_clasps",
    "check_batch_of_kangaroos",
    "check_batch_of_windows",
    "check_certain_sampling",
    "check_choosing",
    "check_clasp",
    "check_growing_recurrent",
    "check_kangaroo_drafts",
    "check_leaving_rows",
    "check_s3d_drafts",
    "check_s3d_tree_sampling",
    "check_sampling",
    "check_sampling_in_one_call",
    "check_sampling_of_likely_tokens",
    "check_shipped_drafts",
    "check_tree_sampling",
}
IN_TEST = [bug for bug, (_, check) in BUGS.items() if check.__name__ not in LONG]


# Other tests run these checks, too.
@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_passes_on_the_code_as_it_is(check: Check) -> None:
    check()


@pytest.mark.parametrize("bug", [*IN_TEST, *thorough(*(bug for bug in BUGS if bug not in IN_TEST))])
def test_a_check_fails_while_the_bug_is_planted(bug: str) -> None:
    plant, check = BUGS[bug]
    with plant(), pytest.raises((AssertionError, ModelError)):
        check()
