"""Hypothesis without clocks, and the same examples at every run: a suite passes or fails for a
reason.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def with_examples(n: int) -> settings:
    return settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
