"""What a draft head keeps of a text from one request to the next."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.drafters.mtp.session import HeadText
from skipsearch.models.kv_cache import KVCache

parts = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5)


@given(parts, st.integers(0, 60))
def test_nothing_stays_that_depends_on_a_token_after_the_shared_ones(
    parts: list[tuple[int, int]], n_shared: int
) -> None:
    text, position = HeadText(KVCache(1, 1, 0)), 0
    for n_read, n_unread in parts:
        text.row_ends += [position + i + 2 for i in range(n_read)]
        position += n_read
        text.unread.append((position, torch.arange(position, position + n_unread)[None, :, None]))
        position += n_unread
    read, unread = list(text.row_ends), [int(i) for _, h in text.unread for i in h.flatten()]
    text.keep(n_shared)
    assert text.row_ends == [end for end in read if end <= n_shared]
    kept = [int(i) for _, hidden in text.unread for i in hidden.flatten()]
    assert kept == [i for i in unread if i < n_shared]
    assert all(first == int(hidden.flatten()[0]) for first, hidden in text.unread)
    text.reset()
    assert not text.row_ends
    assert not text.unread
