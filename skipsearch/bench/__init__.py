"""Side-by-side measurements: one run, interleaved, every peer on the same prompts."""

from skipsearch.bench.peers import PEERS, make_peers
from skipsearch.bench.run import BenchRow, bench

__all__ = ["PEERS", "BenchRow", "bench", "make_peers"]
