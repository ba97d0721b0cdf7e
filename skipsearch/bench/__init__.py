"""Benchmarks: every system decodes the same prompts in one interleaved run.

A speedup is a ratio within one run. Each prompt is decoded by all systems in turn. The order of the
systems rotates, and ratios are paired by prompt:

    skipsearch bench run --profile FILE --systems plain,profile,hf-generate

    benchmark       runs the systems and makes a row of results for each
    systems         the systems by name: our engines and recipes, transformers, llama.cpp
    bench_prompts   the requests that every system decodes
    batch_sizes     speedup by number of requests in a batch (`bench batch`)
    method_table    every drafter at its best settings, in one table (`bench methods`)
    pass_costs      draft and verify costs by engine (`bench run --costs`)
    peak_memory     bytes that a run allocates
    hugging_face    decoding by transformers' `generate`
    llama_cpp       decoding by llama.cpp; `gguf_writer` writes the weights for it
"""

from skipsearch.bench.batch_sizes import BatchRow, add_batch_speedups, run_batch_benchmark
from skipsearch.bench.bench_prompts import BenchRequest, make_random_requests, make_task_requests
from skipsearch.bench.benchmark import BenchRow, DrafterRow, run_benchmark
from skipsearch.bench.pass_costs import CostRow, measure_cost_table, measure_llama_costs
from skipsearch.bench.systems import PLAIN_WEIGHTS, SYSTEMS, ExternalSystem, System, make_systems

__all__ = [
    "PLAIN_WEIGHTS",
    "SYSTEMS",
    "BatchRow",
    "BenchRequest",
    "BenchRow",
    "CostRow",
    "DrafterRow",
    "ExternalSystem",
    "System",
    "add_batch_speedups",
    "make_random_requests",
    "make_systems",
    "make_task_requests",
    "measure_cost_table",
    "measure_llama_costs",
    "run_batch_benchmark",
    "run_benchmark",
]
