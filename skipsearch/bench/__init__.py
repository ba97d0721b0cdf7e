"""Side-by-side measurements: one run, interleaved, every system on the same prompts.

A speedup is a ratio within one run. Each prompt is decoded by all systems in turn, in an order that
rotates, and ratios are paired by prompt:

    skipsearch bench --profile FILE --systems plain,profile,hf-generate

run, systems, requests        the run itself, who takes part, and on what          costs, passes,
memory    where time and bytes go hugging_face, llama_cpp     decoders of others, over the same
weights            side_by_side             batches methods                     every method that
works here, in one table           picture                  a run as a picture"""

from skipsearch.bench.batch_sizes import BatchRow, add_batch_speedups, run_batch_benchmark
from skipsearch.bench.bench_prompts import BenchRequest, make_random_requests, make_task_requests
from skipsearch.bench.benchmark import BenchRow, DrafterRow, run_benchmark
from skipsearch.bench.pass_costs import CostRow, measure_cost_table, measure_llama_costs
from skipsearch.bench.plot import check_plot_file, plot_rows
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
    "check_plot_file",
    "make_random_requests",
    "make_systems",
    "make_task_requests",
    "measure_cost_table",
    "measure_llama_costs",
    "plot_rows",
    "run_batch_benchmark",
    "run_benchmark",
]
