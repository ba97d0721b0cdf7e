"""A draft head for weights in blocks: it begins and learns as the engine native computes, and its
drafts change no token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_files import write_model
from helpers.modules import TRAINED_CARD
from helpers.tiny import VOCAB, tiny_llama
from models.test_gguf import load, make_model

from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.mtp.weights import build_draft_head, plan_depth
from skipsearch.drafters.trained.card import BlockFormat, ModuleCard
from skipsearch.drafters.trained.module_files import make_reference, read_module_header
from skipsearch.drafters.trained.module_weights import check_card, load_module, make_base
from skipsearch.errors import ModelError, ModuleError
from skipsearch.models import ModelAdapter
from skipsearch.replay.generate_together import generate_continuations
from skipsearch.replay.trained_replay import load_trained_draft
from skipsearch.training import draft_head_student, head_text
from skipsearch.training.draft_head_student import DraftHeadStudent, run_full_model
from skipsearch.training.driver import (
    CHECKPOINT,
    collect_head_corpus,
    measure_agreement,
    plan_mtp,
    train,
)
from skipsearch.training.feature_file import FEATURES, FeatureFile, StoredText
from skipsearch.training.head_text import HeadRequests
from skipsearch.training.trainer import Trainer, TrainSettings

pytestmark = pytest.mark.xdist_group("native")
SETTINGS = TrainSettings(
    steps=12, seconds=None, batch_size=2, top_k=8, learning_rate=1e-3, steps_per_teacher_pass=1
)


def model_here(folder: Path, activations: str = "int8") -> Any:
    path = folder / "tiny.gguf"
    if not path.exists():
        write_model(tiny_llama(hidden=64).float(), path, "Q4_1")
    return load(path, activations=activations)


def requests_of(model: ModelAdapter) -> HeadRequests:
    return HeadRequests(model, [], None, False, 0.0, 0)


def texts(n: int = 8, length: int = 12) -> torch.Tensor:
    return torch.randint(VOCAB - 8, (n, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "olmo2"])
def test_a_row_of_training_is_what_the_engine_drafts_there(name: str, tmp_path: Path) -> None:
    write_model(make_model(name), tmp_path / "m.gguf", "Q8_0")
    model, some = load(tmp_path / "m.gguf"), texts(2)
    student = DraftHeadStudent(model, texts(), Vocabulary(lowest=16, tokens="40 50"))
    card = ModuleCard(**student.card, base=make_base(model.spec), trained=TRAINED_CARD)
    tensors = {name: p.detach() for name, p in student.parameters.items()}
    head = build_draft_head(model, card, tensors, "x")
    lesson = student.run_teacher(some, 4)
    assert torch.equal(lesson.hidden, run_full_model(model, some)[0])
    trained = student._run_depths(lesson)
    n_rows, cache = some.shape[1] - 1, head.new_cache(4 * some.shape[1])
    states = lesson.hidden[:1, :-1]
    for depth, step in enumerate(trained):
        rows = step.states[:, : n_rows - depth]
        plan = plan_depth(n_rows, depth, some.device)
        states = head.run(states, some[:1, 1 + depth :], cache, plan)
        torch.testing.assert_close(rows[:1], states, rtol=1e-3, atol=1e-3)
        logits = head.compute_logits(head.adapter, states)
        ids = [*range(16), 40, 50]
        torch.testing.assert_close(student.head(rows)[:1], logits[..., ids], rtol=1e-2, atol=1e-2)
        states = states[:, :-1]


def test_a_layer_of_experts_has_no_copy(tmp_path: Path) -> None:
    write_model(make_model("mixtral"), tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ModelError, match="it has experts"):
        DraftHeadStudent(load(tmp_path / "m.gguf"), None)


@pytest.mark.parametrize(("blocks", "bits"), [(None, 16), ("Q5_0", 5.5)])
def test_a_trained_head_drafts_for_its_file_without_changing_a_token(
    blocks: BlockFormat | None, bits: float, tmp_path: Path
) -> None:
    model, out = model_here(tmp_path), tmp_path / "m"
    corpus, settings = collect_head_corpus(model, requests_of(model), out, SETTINGS, 2000)
    plan = plan_mtp(model, corpus, 48)
    result = train(plan, corpus, out, settings, "900%", blocks=blocks)
    assert [path.name for path in out.iterdir()] == [result.path.name], "features are gone"
    header = read_module_header(result.path)
    tensors, card = load_module(result.path)[1], header.card
    shapes = {name: tuple(p.shape) for name, p in plan.student.parameters.items()}
    assert header.shapes == shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    n_values = sum(t.numel() for t in tensors.values())
    assert result.path.stat().st_size < bits / 8 * n_values + 8000
    if blocks is not None:
        assert result.extra_bytes == result.path.stat().st_size
    # What is said of the module is measured on the values of the file.
    assert card.trained.after == measure_agreement(plan.student, corpus)
    if blocks is not None:
        for name, parameter in plan.student.parameters.items():
            torch.testing.assert_close(parameter.detach(), tensors[name].float())
    assert card.base.quantization == "gguf-q4_1"
    assert card.trained.steps == SETTINGS.steps
    prompts = texts(6).tolist()
    plain = [Decoder(model).generate(prompt, 24, ignore_eos=True).tokens for prompt in prompts]
    draft = load_trained_draft(model, make_reference(result.path, result.path.name), [out])
    assert draft.weights == (("stored", "int8") if blocks is None else ("int5",))
    for weights in ("stored", *draft.weights[-1:]):
        spec = Mtp(
            draft_length=4,
            exit=Fixed(),
            weights=weights,
            vocabulary=card.vocabulary,
            module=make_reference(result.path, result.path.name),
        )
        drafted = accepted = 0
        for prompt, tokens in zip(prompts, plain, strict=True):
            answer = Decoder(model, Recipe((spec,)), module_folders=[out]).generate(
                prompt, 24, ignore_eos=True
            )
            assert answer.tokens == tokens
            drafted, accepted = drafted + answer.stats.drafted, accepted + answer.stats.accepted
        assert 0 < accepted < drafted


def test_a_training_changes_no_weight_of_the_model(tmp_path: Path) -> None:
    model, some = model_here(tmp_path), texts(2)
    hidden, _ = run_full_model(model, some)
    logits = model.head(hidden)
    corpus, settings = collect_head_corpus(
        model, requests_of(model), tmp_path / "m", SETTINGS, 2000
    )
    train(plan_mtp(model, corpus, 48), corpus, tmp_path / "m", settings, "900%")
    hidden_after, _ = run_full_model(model, some)
    assert torch.equal(hidden_after, hidden)
    assert torch.equal(model.head(hidden_after), logits)


def test_a_head_is_refused_with_other_activations(tmp_path: Path) -> None:
    model, other = model_here(tmp_path), model_here(tmp_path, "float")
    student = DraftHeadStudent(model, texts())
    card = ModuleCard(**student.card, base=make_base(model.spec), trained=TRAINED_CARD)
    check_card(card, "mtp", model.spec, "x")
    with_int8_kv = replace(model.spec, quantization="gguf-q4_1-int8-kv")
    check_card(card, "mtp", with_int8_kv, "x")
    assert make_base(with_int8_kv) == make_base(model.spec)
    with pytest.raises(ModuleError, match="ran as gguf-q4_1, and runs as gguf-q4_1-float-activ"):
        check_card(card, "mtp", other.spec, "x")
    plain = replace(model.spec, quantization=None)
    with pytest.raises(ModuleError, match="runs as float32 here"):
        check_card(card, "mtp", plain, "x")
    unbound = card.model_copy(update={"base": make_base(plain)})
    check_card(unbound, "mtp", model.spec, "x")


def test_texts_that_share_a_window_do_not_see_each_other(tmp_path: Path) -> None:
    model = model_here(tmp_path)
    corpus, _ = collect_head_corpus(model, requests_of(model), tmp_path / "m", SETTINGS, 2000)
    file = corpus.features
    assert file is not None
    student = DraftHeadStudent(model, corpus.windows, None, 3, file)

    def run_sorted(windows: torch.Tensor) -> torch.Tensor:
        hidden, targets = student.run_draft(student.run_teacher(windows, 1), 0)
        assert hidden.shape[1] == targets.tokens.shape[1]
        return hidden[0].sum(dim=1)

    shared = file.pack_windows([0, 1, 2], 512)
    assert len(shared) == 1
    alone = [run_sorted(file.pack_windows([i], 512)) for i in range(3)]
    # An answer of n tokens has n − 2 rounds, n − 3 second and n − 4 third steps that count.
    n_answer = [len(text.tokens) - text.n_prompt for text in file.texts[:3]]
    assert [len(rows) for rows in alone] == [3 * n - 6 for n in n_answer]
    found, wanted = run_sorted(shared).sort().values, torch.cat(alone).sort().values
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_features_are_those_of_a_pass_over_the_text_and_the_last_token_has_no_part(
    tmp_path: Path,
) -> None:
    model = model_here(tmp_path)
    prompts = [list(range(3, 3 + n)) for n in (1, 9, 4)]
    written = generate_continuations(model, prompts, 14, None, keep_states=True)
    file = FeatureFile(tmp_path / "features", {}, model.spec.hidden_size, 4)
    for prompt, answer in zip(prompts, written, strict=True):
        for n_cut in (0, 5):  # an answer that repeats itself is cut
            tokens = [*prompt, *answer.tokens[: len(answer.tokens) - n_cut]]
            kept = draft_head_student.compute_features(model, tokens, 4, answer.states)
            fresh = draft_head_student.compute_features(model, tokens, 4)
            n = len(tokens) - (not n_cut)
            for name in ("hidden", "last_input"):
                assert torch.equal(getattr(kept, name)[:n], getattr(fresh, name)[:n])
            assert torch.equal(kept.targets.tokens[:n], fresh.targets.tokens[:n])
            file.add(StoredText(tokens, len(prompt), 1.0, 0), kept)
    student = DraftHeadStudent(model, None, None, 3, file)
    *_, rows = student._read_fit_rows(file.pack_windows(range(len(file.texts)), 200))
    assert int(rows.sum()) == sum(len(text.tokens) - 2 for text in file.texts)


def starts(file: FeatureFile) -> list[tuple[int, int]]:
    """Return (first row, rows) of each text."""
    found, row = [], 0
    for text in file.texts:
        found.append((row, len(text.tokens)))
        row += len(text.tokens)
    return found


class KilledError(Exception):
    pass


def test_a_killed_training_writes_no_text_twice_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = model_here(tmp_path), tmp_path / "m"
    compute, computed = draft_head_student.compute_features, list[tuple[int, ...]]()

    def compute_until_killed(model: ModelAdapter, tokens: list[int], *rest: Any) -> Any:
        if len(computed) == 9:
            raise KilledError
        computed.append(tuple(tokens))
        return compute(model, tokens, *rest)

    monkeypatch.setattr(head_text, "compute_features", compute_until_killed)
    with pytest.raises(KilledError):
        collect_head_corpus(model, requests_of(model), out, SETTINGS, 4000)
    with (out / FEATURES).open("ab") as file:
        file.write(b"half a record")
    again = list[tuple[int, ...]]()
    monkeypatch.setattr(
        head_text,
        "compute_features",
        lambda model, tokens, *rest: again.append(tuple(tokens)) or compute(model, tokens, *rest),
    )
    corpus, settings = collect_head_corpus(model, requests_of(model), out, SETTINGS, 4000)
    assert not set(computed) & set(again)
    file = corpus.features
    assert file is not None
    assert [tuple(text.tokens) for text in file.texts] == [*computed, *again]
    rows = torch.arange(file.n_tokens)
    read = file.read(rows)
    for text, (start, n) in list(zip(file.texts, starts(file), strict=True))[7:11]:
        fresh = compute(model, text.tokens, 8)
        # The pass that wrote the last token did not read it.
        torch.testing.assert_close(
            read.hidden[start : start + n - 1].float(), fresh.hidden[:-1], rtol=0.01, atol=0.01
        )
        assert torch.equal(read.targets.tokens[start : start + n - 1], fresh.targets.tokens[:-1])

    trainer = Trainer(plan_mtp(model, corpus, 48).student, corpus.windows, settings)
    trainer.run_step(0.0)
    trainer.save_checkpoint(out / CHECKPOINT)
    monkeypatch.setattr(head_text, "compute_features", lambda *_: pytest.fail("text was written"))
    same, settings = collect_head_corpus(model, requests_of(model), out, SETTINGS, 400_000)
    assert torch.equal(same.windows, corpus.windows)
    resumed = Trainer(plan_mtp(model, same, 48).student, same.windows, settings)
    resumed.load_checkpoint(out / CHECKPOINT)
    assert resumed.n_steps == 1
    other = HeadRequests(model, [], None, False, 0.0, 1)
    with pytest.raises(ModuleError, match="belongs to another training"):
        collect_head_corpus(model, other, out, SETTINGS, 4000)
