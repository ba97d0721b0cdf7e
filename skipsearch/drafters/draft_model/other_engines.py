"""The command lines of other engines for the same draft model.

They load it whole: sub-layers, bits and tokens that a draft leaves out have no counterpart there.
Sources: docs/speculative.md of llama.cpp, whose pull request 22397 replaced `--draft-max`;
docs/features/speculative_decoding/draft_model.md of vLLM;
docs/advanced_features/speculative_decoding.md of SGLang.
"""

from __future__ import annotations

import json
import shlex

from skipsearch.drafters.draft_model.spec import DraftModel


def list_engine_commands(spec: DraftModel) -> list[str]:
    """Return the commands of llama.cpp, vLLM and SGLang, quoted for a shell.

    MODEL is the full model. The profile's draft length was measured in none of them.
    """
    name, length = spec.model.id.partition("@")[0], spec.draft_length
    file = name if name.lower().endswith(".gguf") else "DRAFT.gguf"
    least = getattr(spec.exit, "threshold", 0.0)  # of the top probability
    config = {"method": "draft_model", "model": name, "num_speculative_tokens": length}
    return [
        f"llama-server -m MODEL.gguf -md {shlex.quote(file)} --spec-type draft-simple "
        f"--spec-draft-n-max {length} --spec-draft-p-min {least:g}",
        f"vllm serve MODEL --speculative-config {shlex.quote(json.dumps(config))}",
        "python3 -m sglang.launch_server --model-path MODEL --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {shlex.quote(name)} --speculative-num-steps {length} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}",
    ]
