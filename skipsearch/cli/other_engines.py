"""The command lines that give other engines the settings of a profile, where they have them.

They have lookup. A draft that skips sub-layers has no counterpart there.
Sources: the options `--spec-type` of llama.cpp's `llama-server`, and `speculative_config` of vLLM.
"""

from __future__ import annotations

import json

from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.profile.schema import Profile


def list_other_engine_commands(profile: Profile) -> list[str]:
    """Return commands for the model MODEL; none if the profile has no lookup.

    No text of the profile is in them, only numbers.
    """
    lookup = next((d for d in profile.measured_recipe.drafters if isinstance(d, Lookup)), None)
    if lookup is None:
        return []
    n_match, n_draft = lookup.min_match, lookup.draft_length
    config = {
        "method": "ngram",
        "num_speculative_tokens": n_draft,
        "prompt_lookup_min": n_match,
        "prompt_lookup_max": n_match,
    }
    return [
        f"llama-server -m MODEL.gguf --spec-type ngram-simple --spec-draft-n-max {n_draft} "
        f"--spec-ngram-simple-size-n {n_match} --spec-ngram-simple-size-m {n_draft}",
        f"vllm serve MODEL --speculative-config '{json.dumps(config)}'",
    ]
