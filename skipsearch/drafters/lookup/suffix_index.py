"""The index of prompt lookup: earlier occurrences of a text's last tokens.

Prompt lookup (Saxena 2023) drafts the tokens that followed an earlier occurrence of the text's last
tokens. This index finds the longest such suffix, of up to `max_match` tokens, and its latest
earlier occurrence.

SAM-Decoding (Hu et al. 2024) finds the longest suffix with a suffix automaton, which knows where a
string ended first. To know where a string ended *last*, an automaton has to walk its suffix links
at every token. These links form the tree of all contexts read backwards, and the walk through this
tree alone finds the longest suffix, too. So this index is the tree, without the automaton's
transitions, cut at depth `max_match`:

- A node stands for a context, the tokens before a position of the text. It stores where the context
  ended last.
- The path of a new token starts at the root with that token and continues backwards through the
  text. The longest match ends where the path leaves the tree, and a leaf is added there.
- An edge may have many tokens. They are not stored but read from the text, so tokens are compared,
  and never only their hashes.

A token adds at most two nodes, so memory is O(text) for any max_match. Adding a token whose match
has n tokens compares and looks up n + 1 tokens. This takes O(max_match), plus the amortised growth
of lists and dictionary. Reading the match takes O(1), reading n tokens O(n).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index as to_int

from skipsearch.errors import DecodeError

ROOT = 0
# Bits of the upper node in an edge's key, below the token. No machine has memory for 2^32 nodes,
# which take over 100 bytes each.
NODE_BITS = 32
DEFAULT_MAX_MATCH = 16


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the text's last tokens."""

    length: int  # number of last tokens that match
    position: int  # index of the token that followed the occurrence


class SuffixIndex:
    """An index over one growing text, whose tokens may be any integers.

    max_match: the most tokens of a match. Raises: DecodeError if max_match < 1.
    """

    def __init__(self, max_match: int = DEFAULT_MAX_MATCH) -> None:
        if max_match < 1:
            raise DecodeError(
                f"max_match is {max_match}; a lookup matches at least one token, so give 1 or more"
            )
        self._max_match = max_match
        self._text: list[int] = []
        # (first token of an edge, upper node), packed into one integer -> lower node
        self._edges: dict[int, int] = {}
        # by node: index of the last token of the latest occurrence of its context
        self._ends = [-1]
        self._depths = [0]  # by node: length of its context
        self._length = 0  # of the latest match
        self._end = -1  # index of the last token of the match

    def __len__(self) -> int:
        """Return the number of tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text.

        Raises: TypeError if a token is no integer; nothing is then appended.
        """
        text, edges, ends, depths, max_match = (
            self._text,
            self._edges,
            self._ends,
            self._depths,
            self._max_match,
        )
        # The shift below could overflow NumPy's integers, but not Python's.
        added = [to_int(token) for token in tokens]
        for token in added:
            new_end = len(text)
            text.append(token)
            node, length, end = ROOT, 0, -1
            while length < max_match:
                # No context in the tree has more than `here` tokens, so `here - length` ≥ 0.
                key = text[new_end - length] << NODE_BITS | node
                child = edges.get(key)
                if child is None:
                    edges[key] = self._add_node(new_end, min(max_match, new_end + 1))
                    break
                end, depth = ends[child], depths[child]
                length += 1
                while length < depth and text[end - length] == text[new_end - length]:
                    length += 1
                # The contexts differ within the edge: split it by a node with the old branch and a
                # new one.
                if length < depth:
                    edges[key] = node = self._add_node(new_end, length)
                    edges[text[end - length] << NODE_BITS | node] = child
                    edges[text[new_end - length] << NODE_BITS | node] = self._add_node(
                        new_end, min(max_match, new_end + 1)
                    )
                    break
                ends[child] = new_end
                node = child
            self._length, self._end = length, end

    def longest_match(self) -> Match | None:
        """Return the latest earlier occurrence of the longest suffix that occurred before.

        The suffix has at most max_match tokens, and may overlap its earlier occurrence. Returns
        None if the last token did not occur before.
        """
        return Match(self._length, self._end + 1) if self._length else None

    def longest_match_of(self, other_text: Sequence[int]) -> Match | None:
        """Return the latest occurrence in this text of the longest suffix of another text.

        The suffix has at most max_match tokens. The search takes O(max_match).
        """
        text, node, length, end = self._text, ROOT, 0, -1
        max_length = min(self._max_match, len(other_text))
        while length < max_length:
            child = self._edges.get(other_text[-1 - length] << NODE_BITS | node)
            if child is None:
                break
            end, depth = self._ends[child], self._depths[child]
            length += 1
            while length < min(depth, max_length) and text[end - length] == other_text[-1 - length]:
                length += 1
            if length < depth:
                break
            node = child
        return Match(length, end + 1) if length else None

    def continuation(self, position: int, n_tokens: int) -> list[int]:
        """Return `n_tokens` tokens from `position` on; [] if n_tokens < 1.

        If the text has fewer, its tokens from `position` on are repeated, as in LZ77.

        Raises: IndexError if `position` is not in the text.
        """
        if not 0 <= position < len(self._text):
            raise IndexError(
                f"position is {position}, and the text has {len(self._text)} tokens; take one from "
                "0 to the last"
            )
        if n_tokens < 1:
            return []
        copied = self._text[position : position + n_tokens]
        return (copied * -(-n_tokens // len(copied)))[:n_tokens]

    def _add_node(self, end: int, depth: int) -> int:
        self._ends.append(end)
        self._depths.append(depth)
        return len(self._ends) - 1
