"""The options of other engines for the same lookup.

A draft that skips sub-layers has no counterpart there.
Sources: the options `--spec-type` of llama.cpp's `llama-server`, and `speculative_config` of vLLM.
"""

from __future__ import annotations

import json
import shlex

from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.lookup.suffix_index import DEFAULT_MAX_MATCH


def list_engine_options(lookup: Lookup) -> tuple[str, str]:
    """Return the options of llama.cpp's `llama-server` and of `vllm serve`, quoted for a shell.

    No text of a profile is in them, only numbers.
    """
    n_match, n_draft = lookup.min_match, lookup.draft_length
    config = {
        "method": "ngram",
        "num_speculative_tokens": n_draft,
        "prompt_lookup_min": n_match,
        "prompt_lookup_max": DEFAULT_MAX_MATCH,
    }
    return (
        f"--spec-type ngram-simple --spec-draft-n-max {n_draft} "
        f"--spec-ngram-simple-size-n {n_match} --spec-ngram-simple-size-m {n_draft}",
        f"--speculative-config {shlex.quote(json.dumps(config))}",
    )
