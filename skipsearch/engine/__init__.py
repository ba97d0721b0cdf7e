"""The engine: the one loop over layers, and what makes it fast: compiled pieces, recorded passes; and passes exact to the bit."""

from skipsearch.engine.choice import Choice, fastest, native_is_wanted, ready
from skipsearch.engine.exact import KEY_BLOCK as EXACT_KEYS
from skipsearch.engine.exact import ROWS as EXACT_ROWS
from skipsearch.engine.exact import exact_forward, is_steady
from skipsearch.engine.forward import Between, Tap, draft_step, forward, inference, onward, resumed
from skipsearch.engine.joined import Wanted, together
from skipsearch.engine.load import ENGINES, load_model
from skipsearch.engine.rows import RowCache, SharedCache
from skipsearch.models.spec import Scored

__all__ = ["ENGINES", "EXACT_KEYS", "EXACT_ROWS", "Between", "Choice", "RowCache", "Scored", "SharedCache", "Tap", "Wanted", "draft_step",
           "exact_forward", "fastest", "forward", "inference", "is_steady", "load_model", "native_is_wanted", "onward", "ready", "resumed",
           "together"]
