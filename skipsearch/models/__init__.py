"""Models: the `ModelAdapter` port, the loader, and one generic adapter over Hugging Face modules."""

from skipsearch.models.loader import adapt, load_adapter, load_tokenizer
from skipsearch.models.spec import ModelAdapter, ModelSpec

__all__ = ["ModelAdapter", "ModelSpec", "adapt", "load_adapter", "load_tokenizer"]
