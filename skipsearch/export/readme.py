"""The README.md of an exported draft: where it comes from, and the commands that run it beside the model.

Commands and options after each engine's own documentation: vLLM, docs/features/speculative_decoding/draft_model.md; SGLang,
docs/advanced_features/speculative_decoding.md; TensorRT-LLM, docs/source/features/speculative-decoding.md and llmapi/llm_args.py;
llama.cpp, docs/speculative.md and examples/speculative-simple; transformers, GenerationConfig. For lookup: vLLM,
docs/features/speculative_decoding/n_gram.md; SGLang, "Ngram speculative decoding"; TensorRT-LLM, NGramDecodingConfig.
"""

from __future__ import annotations

import json
import shlex

from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.suffixes import DEFAULT_MAX_MATCH
from skipsearch.export.conversion import Conversion
from skipsearch.export.draft import CarriedDraft
from skipsearch.export.source import Source
from skipsearch.profile import Profile, dump_profile
from skipsearch.profile.describe import device, speedup
from skipsearch.version import __version__

_HEAD = """\
# A draft of {id}

Cut out of {id}{revision} by skipsearch {version}: the same weights, without
{skipped}. It drafts tokens that the whole
model then verifies in one pass; by itself it writes worse text.

- **The weights here are a second copy.** In skipsearch the model drafts for itself and needs no more
  memory. The engines below load the draft beside the model, and keep a second KV cache for it.
- **Tune the draft length again.** {measured}
  Passes cost something else in every engine: try 1 to {more} tokens, and measure against plain
  decoding on text of yours.
- Run it beside {id}{revision} and no other model: they share one tokenizer, which lies here
  too.
{status}{behind}
The commands are run in the folder that holds `{name}/`.

"""
_UNTRIED = """\
- **No engine has loaded such a folder yet.** Its form follows what vLLM, SGLang, TensorRT-LLM and llama.cpp
  read; skipsearch checks it against a reference of its own, written from config.json alone.
- `configuration_decilm.py` is code, which the engines run (`--trust-remote-code`). It is short: read it.
"""
_BEHIND = """\
- **{drafters} stays behind.** The profile drafts with {shape}, and a checkpoint can hold the skip drafter
  alone. The profile's speedup is that of all its drafters together.
"""

_TRANSFORMERS = """\
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
"""
_NO_TRANSFORMERS = """\
## Transformers

None: transformers has no model class for DeciLM (Nemotron-NAS), so this folder cannot be an
`assistant_model`.
"""

_SERVERS = """\
## vLLM

```sh
vllm serve {target}{trust} \\
    --speculative-config {vllm}
```

## SGLang

```sh
python3 -m sglang.launch_server --model-path {target}{trust} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {path} \\
    --speculative-num-steps {length} --speculative-eagle-topk 1 --speculative-num-draft-tokens {rows}
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
trtllm-serve {target}{trust_trt} --config speculative.yaml
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

The profile also looks up what followed the last {least} or more tokens when they stood in the text before, up to
{most} tokens a round. Engines have a lookup of their own. It mostly takes the place of the draft: measure
both.

| engine | its own lookup |
|---|---|
| vLLM | `--speculative-config {ngram}` |
| SGLang | `--speculative-algorithm NGRAM --speculative-num-draft-tokens {most}` |
| TensorRT-LLM | `decoding_type: NGram` and `max_draft_len: {most}`, without `speculative_model` |
| llama.cpp | `--spec-type ngram-simple`; it goes together with a draft model, before which it is asked |
| Transformers | `prompt_lookup_num_tokens={most}` instead of `assistant_model` |
"""

_FOOT = """
## The profile

```yaml
{profile}```
"""


def readme(profile: Profile, draft: CarriedDraft, source: Source, conversion: Conversion, name: str) -> str:
    """name: of the folder that the draft is written to."""
    mask, length = draft.mask, draft.skip.draft_length
    path, on_hub, known = f"./{name}", "/" in source.id, conversion.known_to_transformers
    target = shlex.quote(source.target)
    values = {
        "id": source.id, "revision": f"@{source.revision}" if source.revision else "", "version": __version__, "name": name,
        "skipped": f"{len(mask.attn)} of {mask.n_layers} attention and {len(mask.mlp)} of {mask.n_layers} MLP sub-layers",
        "measured": _measured(profile, length), "length": length, "more": 2 * length, "rows": length + 1,
        "threshold": getattr(draft.skip.exit, "threshold", 0.0), "status": "" if known else _UNTRIED, "behind": _behind(profile, draft),
        "trust": "" if known else " --trust-remote-code", "trust_trt": "" if known else " --trust_remote_code",
        "target": target, "target_text": json.dumps(source.target), "path": shlex.quote(path), "path_text": json.dumps(path),
        "vllm": shlex.quote(json.dumps({"method": "draft_model", "model": path, "num_speculative_tokens": length})),
        "fetch": f"hf download {source.id} --local-dir target\n" if on_hub else "", "local": "target" if on_hub else target,
        "profile": dump_profile(profile)}
    body = (_TRANSFORMERS if known else _NO_TRANSFORMERS) + "\n" + _SERVERS
    notes = "".join(f"\n{caveat}\n" for caveat in conversion.caveats)
    lookup = _lookup(draft.lookup) if draft.lookup else ""
    return (_HEAD + body).format(**values) + notes + lookup + _FOOT.format(**values)


def _measured(profile: Profile, length: int) -> str:
    if profile.measured is None:
        return f"The profile says {length}, and nobody measured it."
    return f"In skipsearch up to {length} were drafted, for a speedup of {speedup(profile)} on {device(profile)}."


def _behind(profile: Profile, draft: CarriedDraft) -> str:
    if not draft.behind:
        return ""
    drafters = " and ".join(dict.fromkeys(drafter.kind for drafter in draft.behind))
    return _BEHIND.format(drafters=drafters.capitalize(), shape=f"`{profile.candidate.shape}`")


def _lookup(lookup: Lookup) -> str:
    ngram = {"method": "ngram", "num_speculative_tokens": lookup.draft_length, "prompt_lookup_min": lookup.min_match,
             "prompt_lookup_max": DEFAULT_MAX_MATCH}
    return _LOOKUP.format(least=lookup.min_match, most=lookup.draft_length, ngram=shlex.quote(json.dumps(ngram)))
