"""The README.md of an exported draft: its origin, and the commands that run it with its model.

Commands and options follow each engine's documentation. vLLM: docs/features/speculative_decoding/,
draft_model.md and n_gram.md. SGLang: docs/advanced_features/speculative_decoding.md, also for
"Ngram speculative decoding". TensorRT-LLM: docs/source/features/speculative-decoding.md,
llmapi/llm_args.py and NGramDecodingConfig. llama.cpp: docs/speculative.md and
examples/speculative-simple. transformers: GenerationConfig.
"""

from __future__ import annotations

import json
import shlex

from skipsearch import __version__
from skipsearch.drafters.lookup.other_engines import list_engine_options
from skipsearch.export.checkpoint import Checkpoint
from skipsearch.export.exportable import ExportableDraft
from skipsearch.export.hf_checkpoint import Conversion
from skipsearch.profile import Profile, dump_profile
from skipsearch.profile.show import describe_device, format_speedup

_HEAD = """\
# A draft of {id}

Cut out of {id}{revision} by skipsearch {version}: the same weights, without
{skipped}. It drafts tokens that the whole
model then verifies in one pass; by itself it writes worse text.

- **The weights here are a second copy.** In skipsearch the model drafts for itself and needs no
  more memory. The engines below load the draft next to the model, with a second KV cache.
- **Tune the draft length again.** {measured}
  Passes cost something else in every engine: try 1 to {more} tokens, and measure against plain
  decoding on your own text.
- Run it with {id}{revision} and no other model: they share one tokenizer, which is copied here.
{left_out}
The commands are run in the folder that holds `{name}/`.

"""
_LEFT_OUT = """\
- **{drafters} is left out.** The profile drafts with {shape}, and a checkpoint can hold only the
  skip drafter. The profile's speedup is that of all its drafters together.
"""

_COMMANDS = """\
## Transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target_text})
model = AutoModelForCausalLM.from_pretrained({target_text}, dtype="auto")
draft = AutoModelForCausalLM.from_pretrained({path_text}, dtype="auto")
draft.generation_config.num_assistant_tokens = {length}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = {threshold:g}

prompt = tokenizer("def main(argv=None):", return_tensors="pt")
output = model.generate(**prompt, assistant_model=draft, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(output[0]))
```
## vLLM

```sh
vllm serve {target} \\
    --speculative-config {vllm}
```

## SGLang

```sh
python3 -m sglang.launch_server --model-path {target} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {path} \\
    --speculative-num-steps {length} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {rows}
```

## TensorRT-LLM

```sh
cat > speculative.yaml <<'END'
disable_overlap_scheduler: true
speculative_config:
  decoding_type: Draft_Target
  max_draft_len: {length}
  speculative_model: {path_text}
END
trtllm-serve {target} --config speculative.yaml
```

Some releases spell it `decoding_type: DraftTarget`.

## llama.cpp

```sh
{fetch}python3 convert_hf_to_gguf.py {local} --outfile target.gguf
python3 convert_hf_to_gguf.py {path} --outfile draft.gguf
llama-server -m target.gguf -md draft.gguf --spec-type draft-simple --spec-draft-n-max {length}
```

Older builds: `llama-server -m target.gguf -md draft.gguf --draft-max {length}`.
"""

_LOOKUP = """
## Lookup

The profile also copies what followed an earlier occurrence of the last {least} or more tokens, up
to {most} tokens a round. Engines have a lookup of their own, which mostly replaces the draft:
measure both.

| engine | its own lookup |
|---|---|
| vLLM | `{vllm}` |
| SGLang | `--speculative-algorithm NGRAM --speculative-num-draft-tokens {most}` |
| TensorRT-LLM | `decoding_type: NGram` and `max_draft_len: {most}`, without `speculative_model` |
| llama.cpp | `{llama_cpp}`; it can run together with a draft model, and drafts first |
| Transformers | `prompt_lookup_num_tokens={most}` instead of `assistant_model` |
"""

_FOOT = """
## The profile

```yaml
{profile}```
"""


def render_readme(
    profile: Profile, draft: ExportableDraft, source: Checkpoint, conversion: Conversion, name: str
) -> str:
    """Return the text of README.md. name: the name of the folder to which the draft is written."""
    mask, length = draft.mask, draft.skip.draft_length
    path, on_hub = f"./{name}", "/" in source.id
    target = shlex.quote(source.model_argument)
    values = {
        "id": source.id,
        "revision": f"@{source.revision}" if source.revision else "",
        "version": __version__,
        "name": name,
        "skipped": f"{len(mask.attn)} of {mask.n_layers} attention and {len(mask.mlp)} of "
        f"{mask.n_layers} MLP sub-layers",
        "measured": _measurement_text(profile, length),
        "length": length,
        "more": 2 * length,
        "rows": length + 1,
        "threshold": getattr(draft.skip.exit, "threshold", 0.0),
        "left_out": _left_out_text(profile, draft),
        "target": target,
        "target_text": json.dumps(source.model_argument),
        "path": shlex.quote(path),
        "path_text": json.dumps(path),
        "vllm": shlex.quote(
            json.dumps({"method": "draft_model", "model": path, "num_speculative_tokens": length})
        ),
        "fetch": f"hf download {source.id} --local-dir target\n" if on_hub else "",
        "local": "target" if on_hub else target,
        "profile": dump_profile(profile),
    }
    notes = "".join(f"\n{caveat}\n" for caveat in conversion.caveats)
    lookup = ""
    if draft.lookup:
        llama_cpp, vllm = list_engine_options(draft.lookup)
        least, most = draft.lookup.min_match, draft.lookup.draft_length
        lookup = _LOOKUP.format(least=least, most=most, llama_cpp=llama_cpp, vllm=vllm)
    return (_HEAD + _COMMANDS).format(**values) + notes + lookup + _FOOT.format(**values)


def _measurement_text(profile: Profile, length: int) -> str:
    if profile.measured is None:
        return f"The profile says {length}, and nobody measured it."
    return (
        f"In skipsearch up to {length} were drafted, for a speedup of {format_speedup(profile)} on "
        f"{describe_device(profile)}."
    )


def _left_out_text(profile: Profile, draft: ExportableDraft) -> str:
    if not draft.left_out:
        return ""
    drafters = " and ".join(dict.fromkeys(drafter.kind for drafter in draft.left_out))
    return _LEFT_OUT.format(
        drafters=drafters.capitalize(), shape=f"`{profile.measured_recipe.shape}`"
    )
