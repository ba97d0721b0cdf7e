"""Engines: what runs a pass of the model.

Full pass, draft pass and verify pass are one function, `forward`, with another mask and another plan:

    forward(model, tokens, cache, planner.chain(cache.length, 5))               # verify: the pending token and a draft of four
    forward(model, token, cache, planner.chain(cache.length, 1), mask=mask)     # a draft step

It walks over the layers of an adapter, unless the engine has the whole pass ready in one piece (`ModelAdapter.passes`).

forward          the one layer loop                      load, choice        engines by name; which is fastest here
exact            passes that are exact to the bit        rows, joined        passes of several requests as one
native/          C++ for CPUs                            kept                where built code lies, and what is believed of it
graph            passes recorded on a GPU
"""

from skipsearch.engine.choice import Choice, fastest, native_is_wanted, ready
from skipsearch.engine.exact import KEY_BLOCK as EXACT_KEYS
from skipsearch.engine.exact import ROWS as EXACT_ROWS
from skipsearch.engine.exact import exact_forward, is_steady
from skipsearch.engine.forward import (
    Between,
    Tap,
    draft_chain,
    draft_step,
    forward,
    in_one_piece,
    in_parts,
    inference,
    onward,
    resumed,
    states_at,
)
from skipsearch.engine.joined import Wanted, together
from skipsearch.engine.load import ENGINES, current, load_model
from skipsearch.engine.rows import RowCache, SharedCache
from skipsearch.models.spec import Scored

__all__ = ["ENGINES", "EXACT_KEYS", "EXACT_ROWS", "Between", "Choice", "RowCache", "Scored", "SharedCache", "Tap", "Wanted", "current",
           "draft_chain", "draft_step", "exact_forward", "fastest", "forward", "in_one_piece", "in_parts", "inference", "is_steady",
           "load_model", "native_is_wanted", "onward", "ready", "resumed", "states_at", "together"]
