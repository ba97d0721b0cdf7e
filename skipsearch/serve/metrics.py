"""The server's Prometheus metrics, under vLLM's names, for its dashboards. They contain no text of
a request.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skipsearch.core.stats import DecodeStats

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The metrics of one server.

    queue_sizes: returns (requests running, requests waiting); called when the metrics are read.
    """

    def __init__(self, model: str, queue_sizes: Callable[[], tuple[int, int]]):
        self.registry = CollectorRegistry()
        self._model = model
        for place, name in enumerate(("running", "waiting")):
            gauge = Gauge(
                f"vllm:num_requests_{name}",
                f"Requests {name}.",
                ["model_name"],
                registry=self.registry,
            )
            gauge.labels(model).set_function(lambda place=place: float(queue_sizes()[place]))  # type: ignore[misc]
        self._prompt = self._make_counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = self._make_counter("vllm:generation_tokens", "Tokens generated.")
        self._queries = self._make_counter(
            "vllm:prefix_cache_queries",
            "Tokens of prompts that were looked for among known prefixes.",
        )
        self._hits = self._make_counter(
            "vllm:prefix_cache_hits", "Tokens of prompts whose K/V was known."
        )
        self._drafts = self._make_counter(
            "vllm:spec_decode_num_drafts", "Rounds in which something was drafted."
        )
        self._drafted = self._make_counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._make_counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."
        )
        self._accepted_by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place in the draft.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Answers, by how they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "skipsearch:requests_refused",
            "Requests that were answered with an error, by status.",
            ["model_name", "status"],
            registry=self.registry,
        )
        self._time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request to its first token.",
            ["model_name"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        ).labels(model)
        self._time_per_token = Histogram(
            "vllm:time_per_output_token_seconds",
            "Seconds per token, after the first.",
            ["model_name"],
            buckets=TOKEN_TIME_BUCKETS_S,
            registry=self.registry,
        ).labels(model)
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request to its last token.",
            ["model_name"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        ).labels(model)

    def _make_counter(self, name: str, help: str) -> Counter:
        """Register a counter and return it with the label of the model."""
        return Counter(name, help, ["model_name"], registry=self.registry).labels(self._model)

    def record_first_token(self, seconds: float) -> None:
        """Record the seconds from a request to its first token."""
        self._time_to_first_token.observe(seconds)

    def record_round(self, drafted: int, accepted: int, emitted: int) -> None:
        """Record one round of a request."""
        self._generated.inc(emitted)
        if drafted:
            self._drafts.inc()
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
            for place in range(accepted):
                self._accepted_by_position.labels(self._model, place).inc()

    def record_end(self, reason: str, seconds: float, stats: DecodeStats | None) -> None:
        """Record a finished answer.

        reason: OpenAI's `finish_reason`, or "abort" if the client disconnected.
        """
        self._ended.labels(self._model, reason).inc()
        self._latency.observe(seconds)
        if stats is not None:
            self._prompt.inc(stats.prompt_tokens)
            self._queries.inc(stats.prompt_tokens)
            self._hits.inc(stats.cached_tokens)
            if stats.seconds_per_token:
                self._time_per_token.observe(stats.seconds_per_token)

    def record_refusal(self, status: int) -> None:
        """Record a request that was answered with an error."""
        self._refused.labels(self._model, status).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
