"""The commands: their output, their exit status, and one clear message for each mistake."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import EntryPoint, EntryPoints
from inspect import signature
from pathlib import Path

import pytest
import yaml
from helpers.command import cmd, run_in_process
from helpers.costs import made_up_costs
from helpers.marks import thorough
from helpers.threads import one_thread

from skipsearch import engine, searchers
from skipsearch.cli import consoles
from skipsearch.cli.tune import tune
from skipsearch.engine import forward_exact
from skipsearch.errors import ModelError, SearchError, UntrustedCacheWarning
from skipsearch.profile import load_profile
from skipsearch.tuning import driver, settings

__all__ = ["made_up_costs", "one_thread"]

pytestmark = pytest.mark.xdist_group(
    "cli"
)  # one worker, so that the search they share is made once

ROOT = Path(__file__).parents[2]
# The command, but that a search measures no latency table, which takes longer than the rest of a
# small one. The notebooks measure theirs.
WITHOUT_A_TABLE = [
    sys.executable,
    "-c",
    "from helpers import costs\nfrom skipsearch.tuning import calibration\n"
    "from skipsearch.cli.main import main\n"
    "calibration.measure_task_costs = costs.fake_costs\nmain()",
]


def environment():
    paths = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
    )
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": paths,
    }


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Run `tune` once on four short generations, for all tests that read its results."""
    folder = tmp_path_factory.mktemp("small")
    prompts = folder / "prompts.jsonl"
    lines = [
        {"prompt": f'def {name}(path):\n    """{name.title()} the file."""\n    with open(path'}
        for name in ("read", "write", "parse", "check")
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    (folder / "task.yaml").write_text(
        "name: small\nversion: 1\ndescription: a few short functions\nsource: {kind: jsonl, path: "
        "prompts.jsonl}\n"
        'template: "{prompt}"\nmax_new_tokens: 12\nmax_prompt_tokens: 64\nsampling: {temperature: '
        "0.0, top_p: 1.0, top_k: 0}\n"
        "calibration: 2\nholdout: 2\nseed: 0\nend_on_repeat: 6\n"
    )
    out = folder / "profile.yaml"
    arguments = cmd(
        "tune --model demo --task {} --trials 6 --searcher middle --threads 1 --out {} --json",
        folder,
        out,
    )
    done = subprocess.run(
        [*WITHOUT_A_TABLE, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return folder, prompts, out, done


def test_tune_prints_one_json_object_on_stdout_and_progress_on_stderr(tuned):
    _, _, out, done = tuned
    answer = json.loads(done.stdout)
    assert answer["file"] == str(out)
    assert answer["profile"]["provenance"]["trials"] == 6
    assert "searching masks with middle" in done.stderr


def test_the_profile_that_tune_wrote_is_valid_and_was_measured_on_holdout_prompts(
    tuned, capsys, monkeypatch
):
    _, _, out, _ = tuned
    written = yaml.safe_load(out.read_text())
    assert written["measured"]["split"] == "holdout"
    assert (
        written["measured"]["lossless"]["identical"]
        == written["measured"]["lossless"]["prompts"]
        == 2
    )
    assert run_in_process(capsys, monkeypatch, "profile", "validate", out)[0] == 0


def test_tune_does_not_replace_a_profile_unasked(tuned, capsys, monkeypatch):
    task, _, out, _ = tuned
    before = out.read_bytes()
    code, _, shown = run_in_process(
        capsys, monkeypatch, *cmd("tune --model demo --task {} --trials 1 --out {}", task, out)
    )
    assert code == 1
    assert "exists already: continue its search with --resume, replace it with --force" in shown
    assert out.read_bytes() == before


@pytest.mark.usefixtures("made_up_costs")
@pytest.mark.thorough
def test_resume_of_a_finished_search_judges_nothing_again(tuned, capsys, monkeypatch):
    task, _, out, _ = tuned
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "tune --model demo --task {} --trials 6 --searcher middle --threads 1 --out {} "
            "--resume --json",
            task,
            out,
        ),
    )
    assert code == 0, shown
    assert json.loads(printed)["profile"]["provenance"]["trials"] == 6
    assert "trial 1:" not in shown


def test_decode_check_reports_identical_tokens_for_every_prompt(tuned, capsys, monkeypatch):
    _, prompts, out, _ = tuned
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "decode --profile {} --prompts {} --max-new-tokens 12 --threads 1 --check --json",
            out,
            prompts,
        ),
    )
    assert code == 0, shown
    rows = [json.loads(line) for line in printed.splitlines()]
    assert len(rows) == 4
    assert all(row["check"]["identical"] for row in rows)
    assert set(rows[0]) >= {"id", "prompt_tokens", "tokens", "text", "finish_reason", "stats"}


def test_decode_streams_text_to_stdout_and_figures_to_stderr(capsys, monkeypatch):
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd("decode --model demo --prompt {} --threads 1 --max-new-tokens 8", "import os\nimport"),
    )
    assert code == 0, shown
    assert printed.strip()
    assert "8 new tokens, up to the limit, decoded plainly, " in shown
    assert "τ" not in shown, "plain decoding has no rounds to speak of"
    assert "tokens/s" not in printed


def test_decode_says_that_a_text_ended_at_its_first_repeat_and_that_plain_text_needs_no_check(
    capsys, monkeypatch
):
    code, _, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "decode --model demo --prompt {} --threads 1 --max-new-tokens 200 --end-on-repeat 2 "
            "--check",
            "import os\nimport",
        ),
    )
    assert code == 0, shown
    assert "new tokens, up to where the text began to repeat itself, decoded plainly, " in shown
    assert "nothing was drafted, so there was nothing to check" in shown
    assert "×" not in shown


def test_decode_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "class A"}\n{"prompt": "def b"}\n'))
    )
    _, printed, _ = run_in_process(
        capsys, monkeypatch, *cmd("decode - --model demo --max-new-tokens 4 --json")
    )
    assert [len(json.loads(line)["tokens"]) for line in printed.splitlines()] == [4, 4]


def test_bench_compares_systems_on_the_same_tokens(tuned, capsys, monkeypatch):
    task, _, out, _ = tuned
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "bench run --profile {} --task {} --prompts 2 --repeats 1 --threads 1 --json", out, task
        ),
    )
    assert code == 0, shown
    rows = json.loads(printed)["rows"]
    assert [row["system"] for row in rows] == ["plain", "profile", "hf-generate"]
    assert all(row["identical"] == row["prompts"] == 2 for row in rows)


def test_bench_of_batches_tells_the_profile_from_which_size_plain_decoding_is_faster(
    tuned, capsys, monkeypatch, tmp_path
):
    task, _, out, _ = tuned
    kept = tmp_path / "kept.yaml"
    kept.write_bytes(Path(out).read_bytes())
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "bench batch --profile {} --task {} --prompts 2 --repeats 1 --threads 1 --sizes 1,2 "
            "--save --json",
            kept,
            task,
        ),
    )
    assert code == 0, shown
    rows = json.loads(printed)["rows"]
    assert [(row["requests"], row["system"]) for row in rows] == [
        (1, "plain"),
        (1, "profile"),
        (2, "plain"),
        (2, "profile"),
    ]
    found = load_profile(kept).measured
    assert [row.requests for row in found.by_batch] == [1, 2]
    assert found.model_copy(update={"by_batch": ()}) == load_profile(out).measured
    monkeypatch.setattr(consoles, "out", consoles.Terminal(width=160))
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "bench batch --model synthetic:2x64 --prompts 2 --repeats 1 --systems plain,skip "
            "--sizes 3"
        ),
    )
    assert code == 0, shown
    for heading in ("requests", "throughput", "× plain"):
        assert heading in printed, heading


@pytest.mark.thorough
def test_bench_of_random_weights_says_so_and_shows_costs_and_contexts(capsys, monkeypatch):
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "bench run --model synthetic:2x64 --device cpu --prompts 2 --repeats 1 --systems "
            "plain,skip,plain@hf,hf-generate --costs --contexts 16,64 --json"
        ),
    )
    assert code == 0, shown
    assert "random weights: every figure below is of speed only" in shown
    answer = json.loads(printed)
    assert answer["synthetic"] is True
    assert [(row["context"], row["engine"]) for row in answer["costs"]] == [
        (n, engine) for n in (16, 64, 128) for engine in ("lean", "hf")
    ]
    assert all(len(row["v"]) == 15 for row in answer["costs"])
    assert all(row["read_rate"] > 0 and row["read_ceiling"] > 0 for row in answer["costs"])
    assert [row["system"] for row in answer["rows"]] == ["plain", "skip", "plain@hf", "hf-generate"]
    assert all(sorted(row["by_context"]) == ["16", "64"] for row in answer["rows"])
    assert all(row["identical"] == 2 for row in answer["rows"])
    monkeypatch.setattr(consoles, "out", consoles.Terminal(width=160))
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "bench run --model synthetic:2x64 --device cpu --prompts 2 --repeats 1 --systems "
            "plain,skip --costs --contexts 16"
        ),
    )
    assert code == 0, shown
    for heading in ("ms/token", "β", "ms/token by context", "β half"):
        assert heading in printed, heading


@pytest.mark.parametrize("engine", ["lean", *thorough("hf")])
def test_decode_takes_an_engine_and_exact_passes(tuned, capsys, monkeypatch, engine):
    """The options reach the decoder; tests/decoding tests what they do."""
    passes = []
    monkeypatch.setattr(
        "skipsearch.decoding.loop.forward_exact",
        lambda *a, **k: passes.append(a[1].shape[1]) or forward_exact(*a, **k),
    )
    code, printed, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "decode --profile {} --prompt {} --dtype bfloat16 --engine {} --max-new-tokens 30 "
            "--exact --check --json",
            str(tuned[2]),
            "import os",
            engine,
        ),
    )
    assert code == 0, shown
    assert json.loads(printed)["check"]["identical"] is True
    assert f"engine {engine}" in shown
    assert len(passes) > 30


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (cmd("tune --model demmo --task pycode"), 1, "did you mean demo?"),
        (cmd("tune --model demo --task pycod"), 1, "did you mean pycode?"),
        (cmd("tune --model demo --task pycode --searcher middel"), 1, "did you mean middle?"),
        (cmd("tune --model demo --task pycode --budget soon"), 1, "write 90s, 20m or 1.5h"),
        (cmd("tune --model demo --task pycode --objective fast"), 1, "use replay or wall"),
        (cmd("tune --model demo --task pycode --trials 0"), 2, "greater than or equal"),
        (cmd("tune --model demo --task pycode --engine warp"), 1, "no engine called 'warp'"),
        (cmd("tune --model demo --task pycode --dtype int3"), 1, "dtype"),
        (
            cmd("tune --model demo --task pycode --quantization torchao-3bit"),
            1,
            "did you mean torchao-",
        ),
        (cmd("decode --model demo --prompt x --quantization 4bit"), 1, "or none at all"),
        (cmd("bench run --model demo --quantization gptq"), 1, "no quantization called 'gptq'"),
        (
            cmd("decode --model demo --prompt x --quantization native-8bit --engine lean"),
            1,
            "is run by the engine native alone, and not by lean",
        ),
        (
            cmd("bench run --model demo --quantization native-8bit --systems plain,hf-generate"),
            1,
            "native alone, and not by hf",
        ),
        (cmd("tune --model demo --task pycode --resume --force"), 2, "give one of them"),
        (["tune", "--task", "pycode"], 2, "Missing option '--model'"),
        (cmd("decode --model demo --prompt {}", ""), 1, "the prompt is empty"),
        (["decode", "--model", "demo"], 2, "give exactly one of"),
        (cmd("decode --model demo --task pycode --prompt x"), 2, "give it with --profile auto"),
        (cmd("decode --model demo --prompt x --max-new-tokens -3"), 2, "greater than or equal"),
        (cmd("decode --model demo --prompt x --temperature -1"), 1, "temperature is -1"),
        (cmd("decode --model demo --prompt x --top-p 0"), 1, "top_p is 0"),
        (cmd("decode --model demo --prompt x --top-k -2"), 1, "top_k is -2"),
        (
            cmd("decode --model demo --prompt x --temperature 1 --check"),
            2,
            "--check compares greedy tokens",
        ),
        (
            cmd("decode --model demo --prompt x --chat"),
            1,
            "demo has no chat template: leave --chat out",
        ),
        (cmd("decode --model demo --prompt {}", "word " * 3000), 1, "shorten it"),
        (cmd("decode --profile no-such-file.yaml --prompt x"), 1, "no-such-file.yaml"),
        (["decode", "--prompt", "x"], 2, "give --model, or --profile FILE, which names its model"),
        (
            cmd("decode --model no/model --prompts no-such.jsonl"),
            1,
            "no-such.jsonl: cannot be read",
        ),
        (
            cmd("tune --model demo --task pycode --drafters skip,lookup"),
            1,
            "write --drafters lookup,skip",
        ),
        (["bench", "run"], 2, "give --profile FILE or --model M"),
        (["bench", "batch"], 2, "give --profile FILE or --model M"),
        (["bench", "methods"], 2, "Missing option '--model'"),
        (cmd("bench run --model demo --systems plain,plian"), 1, "did you mean plain"),
        (cmd("bench run --model demo --contexts 128,long"), 2, "write numbers with commas"),
        (
            cmd("bench batch --model demo --sizes 8,many"),
            2,
            "--sizes is '8,many'; write numbers with commas between them, such as 1,2,4,8",
        ),
        (cmd("bench batch --model demo --sizes {}", ""), 2, "--sizes is ''"),
        (cmd("bench batch --model demo --save"), 2, "--save goes with --profile"),
        (
            cmd("bench batch --model demo --systems plain,hf-generate"),
            2,
            "`bench batch` compares our own systems",
        ),
        (
            cmd("bench batch --model demo --systems {}", "plain, hf-generate"),
            2,
            "`bench batch` compares our own systems",
        ),
        *(
            (["bench", command, "--model", "demo", *flag], 2, f"No such option: {flag[0]}")
            for command, *flag in (
                ("run", "--sizes", "8"),
                ("run", "--modules", "x"),
                ("batch", "--costs"),
                ("batch", "--contexts", "128"),
                ("methods", "--systems", "plain"),
                ("methods", "--profile", "x.yaml"),
            )
        ),
        (["bench", "rum"], 2, "Did you mean 'run'?"),
        (["train", "adapter"], 2, "Did you mean 'adapted'?"),
        (["bench", "run", "--model", "synthetic:llama-2-14b"], 1, "did you mean llama-2-13b"),
        (
            cmd("tune --model synthetic:2x64 --task pycode"),
            1,
            "so a profile could not say which weights it is for",
        ),
        (
            cmd("decode --model demo --prompt x --device cpu --engine graph"),
            1,
            "use --device cuda, or --engine lean",
        ),
        (["list", "colours"], 2, "is not one of models"),
    ],
)
def test_a_mistake_gets_one_sentence_and_no_traceback(
    capsys, monkeypatch, arguments, status, sentence
):
    code, printed, shown = run_in_process(capsys, monkeypatch, *arguments)
    assert code == status, shown
    assert sentence in shown
    assert "Traceback" not in shown
    assert printed == ""


def test_a_profile_of_another_model_is_refused(tuned, tmp_path, capsys, monkeypatch):
    out = tuned[2]
    other = tmp_path / "other.yaml"
    text = out.read_text()
    other.write_text(text.replace(yaml.safe_load(text)["model"]["config_sha256"], "0" * 64))
    code, _, shown = run_in_process(
        capsys, monkeypatch, *cmd("decode --profile {} --prompt x", other)
    )
    assert code == 1
    assert "load the model it was made for" in shown


def test_an_unwritable_out_is_found_before_the_search(capsys, monkeypatch):
    code, _, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd("tune --model demo --task pycode --out /proc/nowhere/profile.yaml"),
    )
    assert code == 1
    assert "choose another with --out" in shown
    assert "continuing" not in shown


@pytest.mark.parametrize("asked", [True, False])
def test_the_latency_table_is_measured_again_on_request(capsys, monkeypatch, tmp_path, asked):
    def search(*_, remeasure, **__):
        raise SearchError(f"a fresh table: {remeasure}")

    monkeypatch.setattr(driver, "tune", search)
    code, _, shown = run_in_process(
        capsys,
        monkeypatch,
        *cmd("tune --model demo --task pycode --out {}", tmp_path / "profile.yaml"),
        *(["--remeasure-latency"] if asked else []),
    )
    assert code == 1
    assert f"a fresh table: {asked}" in shown


def test_a_folder_of_compiled_code_that_is_not_trusted_is_one_sentence(capsys, monkeypatch):
    def load(*_, **__):
        warnings.warn(
            UntrustedCacheWarning("/x lets others write to it: chmod 700 /x"), stacklevel=1
        )
        raise ModelError("enough")

    monkeypatch.setattr(engine, "load_for_switching", load)
    code, _, shown = run_in_process(capsys, monkeypatch, *cmd("decode --model demo --prompt x"))
    assert code == 1
    assert shown == "warning: /x lets others write to it: chmod 700 /x error: enough"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_sentence():
    command = f"{sys.executable} -m skipsearch.cli.main list exits --json > /dev/full"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT
    )
    assert done.returncode == 1
    assert "No space left on device: make room, or send the result elsewhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("made_up_costs")
def test_an_interrupted_search_keeps_its_trials_and_resumes(tuned, tmp_path, capsys, monkeypatch):
    """Ctrl-C interrupts it; tests/tuning/test_driver.py kills searches."""
    task, out = tuned[0], tmp_path / "profile.yaml"
    journal = out.with_suffix(".journal")
    search = cmd(
        "tune --model demo --task {} --searcher random --threads 1 --out {}", str(task), str(out)
    )
    # A shell's background job ignores SIGINT and hands that on; what is tested is a terminal's
    # foreground process.
    running = subprocess.Popen(
        [*WITHOUT_A_TABLE, *search, "--budget", "10m"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and finished(journal) < 5:
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    kept, judged = finished(journal), journal.read_bytes()
    assert kept >= 5
    code, printed, shown = run_in_process(
        capsys, monkeypatch, *search, "--trials", kept + 2, "--resume", "--json"
    )
    assert code == 0, shown
    assert json.loads(printed)["profile"]["provenance"]["trials"] == kept + 2
    assert journal.read_bytes().startswith(judged[: judged.rindex(b"\n") + 1]), (
        "every mask that was judged is kept"
    )
    assert load_profile(out).provenance.trials == kept + 2


def finished(journal):
    """Count the trials in the journal, replayed ones included."""
    return journal.read_text().count('"op_code":4') if journal.exists() else 0


@pytest.mark.parametrize("command", ["tune", "decode", "bench", "train", "list", "doctor"])
def test_help_shows_an_example_first(capsys, monkeypatch, command):
    code, printed, _ = run_in_process(capsys, monkeypatch, command, "--help")
    assert code == 0
    body = [line.strip() for line in printed.splitlines() if line.strip()]
    assert body[1].startswith(f"Example: skipsearch {command}")


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("models", "llama-2-13b"),
        ("tasks", "pycode"),
        ("searchers", "gp"),
        ("engines", "lean"),
        ("drafters", "skip"),
        ("exits", "adaptive"),
    ],
)
def test_list_knows_every_kind_of_name(capsys, monkeypatch, what, name):
    code, printed, _ = run_in_process(capsys, monkeypatch, "list", what, "--json")
    assert code == 0
    assert name in json.loads(printed)


def test_list_shows_the_searchers_of_others_and_one_that_is_broken(capsys, monkeypatch):
    points = EntryPoints(
        [
            EntryPoint("theirs", "skipsearch.searchers.gp:GP", searchers.ENTRY_POINT_GROUP),
            EntryPoint("broken", "no_such_package:X", searchers.ENTRY_POINT_GROUP),
        ]
    )
    monkeypatch.setattr(searchers, "entry_points", lambda group: points.select(group=group))
    code, printed, _ = run_in_process(capsys, monkeypatch, "list", "searchers", "--json")
    said = json.loads(printed)
    assert code == 0
    assert said["theirs"] == said["gp"]
    assert said["broken"] == "cannot be imported: No module named 'no_such_package'"


def test_tune_has_the_defaults_of_python(capsys, monkeypatch):
    assert signature(tune).parameters["searcher"].default == settings.DEFAULT_SEARCHER
    _, printed, _ = run_in_process(capsys, monkeypatch, "tune", "--help")
    said = " ".join(printed.replace("│", "").split())
    assert f"Default: {settings.DEFAULT_TRIALS}, or no limit with --budget." in said
    assert f"Default: {settings.DEFAULT_BUDGET_S / 60:.0f}m, or no limit with --trials." in said


def test_doctor_finds_a_working_installation(capsys, monkeypatch):
    code, printed, _ = run_in_process(capsys, monkeypatch, "doctor", "--json")
    assert code == 0, printed
    assert json.loads(printed)["healthy"] is True
