"""Side-by-side measurements: one run, interleaved, every peer on the same prompts.

A speedup is a ratio within one run. Each prompt is decoded by all peers in turn, in an order that rotates, and ratios are paired by prompt:

    skipsearch bench --profile FILE --peers plain,profile,hf-generate

run, peers, requests        the run itself, who takes part, and on what          costs, passes, memory    where time and bytes go
hugging_face, llama_cpp     decoders of others, over the same weights            side_by_side             batches
methods                     every method that works here, in one table           picture                  a run as a picture
"""

from skipsearch.bench.costs import CostRow, cost_table, llama_row
from skipsearch.bench.peers import PEERS, PLAIN_WEIGHTS, Peer, TheirPeer, make_peers
from skipsearch.bench.picture import check_picture, draw
from skipsearch.bench.requests import Request, random_requests, task_requests
from skipsearch.bench.run import BenchRow, DrafterRow, bench
from skipsearch.bench.side_by_side import BatchRow, batches, with_batches

__all__ = ["PEERS", "PLAIN_WEIGHTS", "BatchRow", "BenchRow", "CostRow", "DrafterRow", "Peer", "Request", "TheirPeer", "batches", "bench",
           "check_picture", "cost_table", "draw", "llama_row", "make_peers", "random_requests", "task_requests",
           "with_batches"]
