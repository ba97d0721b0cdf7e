"""What is done to a model between two calls of `ss.generate` is noticed: its text is transformers'
own, or refused.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from decoding.round_counts import counted
from helpers.tiny import LAYERS, tiny_llama
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

import skipsearch as ss
from skipsearch.errors import UnsupportedRequest
from skipsearch.integrations import decoder_cache

MASK = ss.SkipMask(LAYERS, (1, 3), (2,))
IDS = torch.tensor([[5, 17, 40, 3]])
Alteration = Callable[[Any], AbstractContextManager[None]]


@pytest.fixture
def drafted() -> Iterator[list[int]]:
    """Tokens drafted in each round since."""
    with counted("drafted") as rounds:
        yield rounds


def ours(model: Any, **settings: Any) -> list[int]:
    return ss.generate(model, IDS, MASK, max_new_tokens=10, eos_token_id=None, **settings)[
        0
    ].tolist()


def transformers_own(model: Any) -> list[int]:
    return type(model).generate(model, IDS, max_new_tokens=10, eos_token_id=None)[0].tolist()


# --- code of a caller's own


def shifted(output: Any) -> Any:
    """Another hidden state or other logits, so that another text comes of them."""
    if isinstance(output, Tensor):
        return output.roll(1, dims=-1)
    if isinstance(output, tuple):
        return (shifted(output[0]), *output[1:])
    key = "logits" if "logits" in output else "last_hidden_state"
    output[key] = shifted(output[key])
    return output


def hook_on(path: str) -> Alteration:
    @contextmanager
    def alter(model: Any) -> Iterator[None]:
        handle = model.get_submodule(path).register_forward_hook(
            lambda module, args, output: shifted(output)
        )
        yield
        handle.remove()

    return alter


@contextmanager
def pre_hook(model: Any) -> Iterator[None]:
    handle = model.model.layers[1].mlp.register_forward_pre_hook(
        lambda module, args: (shifted(args[0]), *args[1:])
    )
    yield
    handle.remove()


@contextmanager
def global_hook(model: Any) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: shifted(output) if module is model.lm_head else None
    )
    yield
    handle.remove()


def forward_of(path: str) -> Alteration:
    @contextmanager
    def alter(model: Any) -> Iterator[None]:
        module = model.get_submodule(path)
        own = module.forward
        module.forward = MethodType(
            lambda self, *args, **kwargs: shifted(own(*args, **kwargs)), module
        )
        yield
        del module.forward

    return alter


FOREIGN = {
    "a hook on a layer": hook_on("model.layers.2"),
    "on an MLP": hook_on("model.layers.2.mlp"),
    "on the decoder": hook_on("model"),
    "on the head": hook_on("lm_head"),
    "on the model": hook_on(""),
    "a pre-hook": pre_hook,
    "a global hook": global_hook,
    "another forward of the model": forward_of(""),
    "of an attention": forward_of("model.layers.0.self_attn"),
}


@pytest.mark.parametrize("alter", FOREIGN.values(), ids=FOREIGN)
def test_code_of_a_callers_own_is_refused_as_before_the_first_call_or_handed_over(
    alter: Alteration, drafted: list[int]
) -> None:
    model = tiny_llama()
    expected = transformers_own(model)
    assert ours(model) == expected
    ss.attach(model, MASK)
    with alter(model):
        steered = transformers_own(model)
        assert steered != expected, "the alteration changes nothing, so this test shows nothing"
        with pytest.raises(ss.ModelError) as after:
            ours(model)
        with alter(fresh := tiny_llama()), pytest.raises(ss.ModelError) as before:
            ours(fresh)
        assert str(after.value) == str(before.value)
        assert isinstance(after.value, UnsupportedRequest)
        drafted.clear()
        assert ours(model, fallback=True) == steered
        assert model.generate(IDS, max_new_tokens=10, eos_token_id=None)[0].tolist() == steered
        ss.attach(model, MASK, fallback=False)
        with pytest.raises(ss.ModelError):
            model.generate(IDS)
        assert not drafted
    assert ours(model) == expected
    assert sum(drafted) > 0, "drafts again, once it is as it was"


def test_a_hook_that_only_looks_is_refused_too_since_it_would_see_nothing() -> None:
    model, seen = tiny_llama(), []
    ours(model)
    model.model.layers[2].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(ss.ModelError, match=r"model\.layers\.2 has a forward hook"):
        ours(model)
    ours(model, fallback=True)
    assert seen


def test_code_of_a_class_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is patched within a class: the layers that we drive run it as well."""
    model = tiny_llama()
    expected, of_mlp, of_model = ours(model), LlamaMLP.forward, LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: shifted(of_mlp(self, x)))
    assert ours(model) == transformers_own(model) != expected
    monkeypatch.setattr(
        LlamaForCausalLM,
        "forward",
        lambda self, *args, **kwargs: shifted(of_model(self, *args, **kwargs)),
    )
    with pytest.raises(ss.ModelError, match="otherwise than its own forward"):
        ours(model)


# --- modules and weights


class Shifted(nn.Module):
    """Another module in the place of one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return shifted(self.inner(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def replace_mlp(model: Any) -> None:
    model.model.layers[2].mlp = Shifted(model.model.layers[2].mlp)


def replace_head(model: Any) -> None:
    model.lm_head = Shifted(model.lm_head)


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", Doubled())


def weights_in_place(model: Any) -> None:
    model.load_state_dict(tiny_llama(seed=7).state_dict())


def weights_assigned(model: Any) -> None:
    model.load_state_dict(tiny_llama(seed=7).state_dict(), assign=True)


@pytest.mark.parametrize(
    "alter", [replace_mlp, replace_head, parametrized, weights_in_place, weights_assigned]
)
def test_other_modules_and_weights_are_those_that_decode(
    alter: Callable[[Any], None], drafted: list[int]
) -> None:
    model = tiny_llama()
    before = ours(model)
    decoder = decoder_cache._CACHE[model][0].decoder
    alter(model)
    assert ours(model) == transformers_own(model) != before
    assert decoder_cache._CACHE[model][0].decoder is not decoder
    assert sum(drafted) > 0


def test_what_libraries_hook_in_is_no_reason_to_refuse(drafted: list[int]) -> None:
    model = tiny_llama()
    expected = ours(model)
    model(IDS, output_hidden_states=True)  # for which transformers leaves hooks on the layers
    assert any(module._forward_hooks for module in model.modules())
    nn.utils.weight_norm(model.model.layers[0].mlp.up_proj)
    drafted.clear()
    assert ours(model) == transformers_own(model) == expected
    assert sum(drafted) > 0


def test_nothing_of_ours_stays_on_a_model() -> None:
    model = tiny_llama()
    ours(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- copies


def through_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_an_attached_model_is_attached_and_runs_its_own_weights(
    copied: Callable[[Any], Any], drafted: list[int]
) -> None:
    model = tiny_llama()
    ss.attach(model, MASK)
    first = model.generate(IDS, max_new_tokens=10)[0].tolist()
    other = copied(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(-3)
    drafted.clear()
    assert other.generate(IDS, max_new_tokens=10)[0].tolist() == transformers_own(other) != first
    assert sum(drafted) > 0
    assert model.generate(IDS, max_new_tokens=10)[0].tolist() == first
    del model
    assert other.generate(IDS, max_new_tokens=10)[0].tolist() != first
    ss.detach(other)
    assert "generate" not in vars(other)
