"""Engines run the passes of a model.

Full, draft and verify passes are calls of one function, `forward`, with different masks and plans:

    forward(model, tokens, cache, planner.plan_chain(n, 5))  # verify a draft of 4 tokens
    forward(model, token, cache, planner.plan_chain(n, 1), mask=m)  # a draft step

`forward` runs the layers of an adapter one by one, unless the engine runs whole passes itself
(`ModelAdapter.pass_runner`).

    forward                     the layer loop
    engines, load, select       engines by name; loading a model; which engine is fastest here
    on_same_engine              drafts with weights of their own
    batch_invariant             passes that are exact to the bit
    shared_cache, batched_pass  passes of several requests as one
    native/                     C++ for CPUs
    code_cache                  compiled code that later processes load
    cuda_graph                  passes captured on a GPU
    sampler                     choose a token from logits
"""

from skipsearch.engine.batch_invariant import (
    EXACT_KEY_BLOCK,
    EXACT_ROWS,
    forward_exact,
    is_batch_invariant,
    refuse_unless_exact,
)
from skipsearch.engine.batched_pass import PassRequest, run_batched
from skipsearch.engine.engines import ENGINES, is_native_allowed, switch_engine
from skipsearch.engine.forward import (
    LayerInputTap,
    LayerTap,
    MidLayerTap,
    can_start_midway,
    draft_chain,
    draft_step,
    forward,
    get_layer_runner,
    no_grad,
    resume_pass,
    run_layers,
    run_up_to_layer,
)
from skipsearch.engine.load import load_for_switching, load_model
from skipsearch.engine.select import EngineChoice, pick_fastest
from skipsearch.engine.shared_cache import RowCache, SharedCache
from skipsearch.models.adapter import DraftScores

__all__ = [
    "ENGINES",
    "EXACT_KEY_BLOCK",
    "EXACT_ROWS",
    "DraftScores",
    "EngineChoice",
    "LayerInputTap",
    "LayerTap",
    "MidLayerTap",
    "PassRequest",
    "RowCache",
    "SharedCache",
    "can_start_midway",
    "draft_chain",
    "draft_step",
    "forward",
    "forward_exact",
    "get_layer_runner",
    "is_batch_invariant",
    "is_native_allowed",
    "load_for_switching",
    "load_model",
    "no_grad",
    "pick_fastest",
    "refuse_unless_exact",
    "resume_pass",
    "run_batched",
    "run_layers",
    "run_up_to_layer",
    "switch_engine",
]
