"""Where the end of a text stood in it before: the index behind prompt lookup.

Prompt lookup (Saxena 2023) drafts what followed an earlier occurrence of the text's last tokens. This index answers for the longest such
suffix, up to `max_match` tokens, and for its latest earlier occurrence. SAM-Decoding (Hu et al. 2024) finds the longest suffix with a
suffix automaton, which knows where a string ended first. To know where it ended *last*, an automaton has to walk its suffix links at every
token. These links form the tree of all contexts read backwards, and the walk alone finds the longest suffix too. So this index is that
tree, without the automaton's transitions, cut at depth `max_match`:

- A node stands for a context, the tokens that precede a place in the text, and says where it ended last.
- The path of a new token starts at the root with that token and goes back through the text. Where it leaves the tree, the longest match
  ends, and a leaf is added there.
- An edge may carry many tokens. They are not stored but read from the text, so tokens are compared and never only their hashes.

A token adds at most two nodes, so memory is O(text), whatever max_match is. It compares and looks up as many tokens as its match has, and
one more: O(max_match), beside the growth of lists and dictionary, which is amortised. Asking for the match takes O(1), n tokens O(n).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index as to_int

from skipsearch.errors import DecodeError

ROOT = 0
NODE_BITS = 32   # of an edge's key, below the token; a node takes over 100 bytes, so no machine has room for 2^32 of them
DEFAULT_MAX_MATCH = 16


@dataclass(frozen=True, slots=True)
class Match:
    """The text's last `length` tokens stood before `position` too; position: index of the token that followed them there."""

    length: int
    position: int


class SuffixIndex:
    """One growing text. Tokens are integers of any size.

    max_match: tokens of the text's end that are looked up, at most.
    Raises: DecodeError if max_match < 1.
    """

    def __init__(self, max_match: int = DEFAULT_MAX_MATCH) -> None:
        if max_match < 1:
            raise DecodeError(f"max_match is {max_match}; a lookup matches at least one token, so give 1 or more")
        self._max_match = max_match
        self._text: list[int] = []
        self._edges: dict[int, int] = {}   # (the edge's first token, its upper node) in one integer -> its lower node
        self._ends = [-1]                  # of a node: index of the last token of its context's latest occurrence
        self._depths = [0]                 # of a node: tokens of its context
        self._length = 0
        self._end = -1

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text grows. Raises: TypeError, before anything is added, if a token is no integer."""
        text, edges, ends, depths, max_match = self._text, self._edges, self._ends, self._depths, self._max_match
        added = [to_int(token) for token in tokens]   # NumPy's integers become Python's, whose shift below cannot overflow
        for token in added:
            here = len(text)
            text.append(token)
            node, length, end = ROOT, 0, -1
            while length < max_match:
                # No context in the tree has more than `here` tokens, so there is one more to read here.
                key = text[here - length] << NODE_BITS | node
                child = edges.get(key)
                if child is None:
                    edges[key] = self._add(here, min(max_match, here + 1))
                    break
                end, depth = ends[child], depths[child]
                length += 1
                while length < depth and text[end - length] == text[here - length]:
                    length += 1
                if length < depth:   # the contexts part within the edge: a node in its middle, with the old way on and a new one
                    edges[key] = node = self._add(here, length)
                    edges[text[end - length] << NODE_BITS | node] = child
                    edges[text[here - length] << NODE_BITS | node] = self._add(here, min(max_match, here + 1))
                    break
                ends[child] = here
                node = child
            self._length, self._end = length, end

    def match(self) -> Match | None:
        """The longest suffix of the text, of at most max_match tokens, that ended before the last token too, and the latest place where it
        did; the two may overlap. None if the last token is new."""
        return Match(self._length, self._end + 1) if self._length else None

    def find(self, tail: Sequence[int]) -> Match | None:
        """The longest end of *another* text, of at most max_match tokens, that stands in this one, and its latest place. O(max_match)."""
        text, node, length, end = self._text, ROOT, 0, -1
        most = min(self._max_match, len(tail))
        while length < most:
            child = self._edges.get(tail[-1 - length] << NODE_BITS | node)
            if child is None:
                break
            end, depth = self._ends[child], self._depths[child]
            length += 1
            while length < min(depth, most) and text[end - length] == tail[-1 - length]:
                length += 1
            if length < depth:
                break
            node = child
        return Match(length, end + 1) if length else None

    def follow(self, position: int, n: int) -> list[int]:
        """The n tokens from `position` on. Where the text ends they go on with themselves, as a copy in LZ77 does: what stands behind
        `position` is taken as a period. n < 1 gives none.

        Raises: IndexError if there is no token at `position`.
        """
        if not 0 <= position < len(self._text):
            raise IndexError(f"position is {position}, and the text has {len(self._text)} tokens; take one from 0 to the last")
        if n < 1:
            return []
        copied = self._text[position:position + n]
        return (copied * -(-n // len(copied)))[:n]

    def _add(self, end: int, depth: int) -> int:
        self._ends.append(end)
        self._depths.append(depth)
        return len(self._ends) - 1


def matches(tokens: Sequence[int], start: int, max_match: int = DEFAULT_MAX_MATCH) -> Iterator[Match | None]:
    """The match of each prefix of a finished text, from tokens[:start] to all of it: len(tokens) - start + 1 of them.

    Raises, when the first is asked for: DecodeError if max_match < 1, IndexError if the text has no such prefix.
    """
    if not 0 <= start <= len(tokens):
        raise IndexError(f"start is {start}, and the text has {len(tokens)} tokens; take one from 0 to their number")
    index = SuffixIndex(max_match)
    index.extend(tokens[:start])
    yield index.match()
    for place in range(start, len(tokens)):
        index.extend((tokens[place],))
        yield index.match()
