"""`llm`, `lm-eval` and `guidellm`, unmodified, against a server of the embedded model. Run by
.ci/clients; fails if anything differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "skipsearch" / "demo" / "model"
BIN = Path(sys.executable).parent
KEY = "a-key"
LOAD, STREAMS, ANSWER = (
    24,
    4,
    12,
)  # of guidellm: requests, how many at a time, tokens of each answer
QUESTIONS = [
    ("import", [" os", " zebra"], 0),
    ("for i in range(", ["10", "def"], 0),
    ("def __init__(self", ["):", " banana"], 0),
    ("return self", [".", "("], 1),
    ("class A(object", ["):", "=="], 0),
    ("try:\n    import", [" json", " else"], 0),
    ("if __name__ ==", [" '__main__'", " None"], 0),
    ("while True", [":", "import"], 0),
]
TASK = """\
task: small_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "SKIPSEARCH_API_KEY": KEY,
            "OPENAI_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "LLM_USER_PATH": str(folder / "llm"),
            "HF_HOME": str(folder / "hf"),
            "OMP_NUM_THREADS": "1",
            "XDG_DATA_HOME": str(folder / "data"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        log = folder / "log"
        with log.open("w") as said:
            server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "skipsearch.cli.main",
                    "serve",
                    "--model",
                    "demo",
                    "--task",
                    "pycode",
                    "--port",
                    "0",
                    "--engine",
                    "hf",
                    "--threads",
                    "1",
                ],
                stderr=said,
                env=environment,
                cwd=ROOT,
            )
        try:
            address = wait_for(server, log)
            with_llm(address, environment, folder)
            with_lm_eval(address, environment, folder)
            with_guidellm(address, environment, folder)
        finally:
            server.terminate()
            server.wait(60)


def wait_for(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(1200):
        text = log.read_text()
        if " at http://" in text:
            return text.split(" at ")[-1].split(";")[0].strip()
        if server.poll() is not None:
            raise SystemExit(f"the server did not start:\n{text}")
        time.sleep(0.1)
    raise SystemExit("the server did not start within two minutes")


def run(program: str, *arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [str(BIN / program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(
            f"{program} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def with_llm(address: str, environment: dict[str, str], folder: Path) -> None:
    """As its documentation has it: a model of another server, in extra-openai-models.yaml."""
    (folder / "llm").mkdir()
    (folder / "llm" / "extra-openai-models.yaml").write_text(
        f'- model_id: here\n  model_name: demo\n  api_base: "{address}/v1"\n  api_key_name: here\n '
        " completion: true\n"
    )
    run("llm", "keys", "set", "here", "--value", KEY, environment=environment)
    asked = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "12", "import os\nimport")
    streamed, whole = (
        run("llm", *asked, environment=environment),
        run("llm", "--no-stream", *asked, environment=environment),
    )
    if not whole.strip() or streamed != whole:
        raise SystemExit(f"llm printed {streamed!r} streamed and {whole!r} at once")
    print(f"llm: {whole.strip()!r}, streamed and at once")


def with_lm_eval(address: str, environment: dict[str, str], folder: Path) -> None:
    """A small local task: its score, and the log-likelihood of each choice, by both backends."""
    data = folder / "questions.jsonl"
    data.write_text(
        "".join(
            json.dumps({"text": text, "choices": choices, "answer": answer}) + "\n"
            for text, choices, answer in QUESTIONS
        )
    )
    (folder / "tasks").mkdir()
    (folder / "tasks" / "small_choices.yaml").write_text(TASK.format(data=data))
    backends = {
        "local-completions": (
            f"model=demo,base_url={address}/v1/completions,tokenizer={MODEL},"
            "num_concurrent=2,max_retries=1"
        ),
        "hf": f"pretrained={MODEL},dtype=float32",
    }
    found = {}
    for backend, arguments in backends.items():
        out = folder / backend
        run(
            "lm_eval",
            "--model",
            backend,
            "--model_args",
            arguments,
            "--tasks",
            "small_choices",
            "--include_path",
            str(folder / "tasks"),
            "--batch_size",
            "1",
            "--device",
            "cpu",
            "--output_path",
            str(out),
            "--log_samples",
            environment=environment,
        )
        results = json.loads(next(out.rglob("results_*.json")).read_text())["results"][
            "small_choices"
        ]
        lines = next(out.rglob("samples_*.jsonl")).read_text().splitlines()
        samples = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
        found[backend] = (
            results["acc,none"],
            [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples],
        )
    (ours, our_figures), (theirs, their_figures) = found.values()
    apart = max(
        abs(a - b)
        for one, other in zip(our_figures, their_figures, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    if ours != theirs or apart > 1e-3:
        raise SystemExit(
            f"lm-eval: accuracy {ours} through the server and {theirs} through transformers, "
            "log-likelihoods up to "
            f"{apart:.2g} apart"
        )
    print(f"lm-eval: accuracy {ours} by both backends, log-likelihoods at most {apart:.1g} apart")


def with_guidellm(address: str, environment: dict[str, str], folder: Path) -> None:
    """A short load of streamed completions: none fails, and each answer has as many tokens as were
    asked for.

    Up to three that guidellm itself calls incomplete are told and are no failure: that nothing is
    lost is what the load in tests/serve/test_robustness.py is for."""
    out = folder / "load.json"
    run(
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={address},model=demo,api_key={KEY},request_format=/v1/completions",
        "--tokenizer",
        f"kind=huggingface_auto,model={MODEL}",
        "--data",
        f"kind=synthetic_text,prompt_tokens=24,output_tokens={ANSWER}",
        "--profile",
        f"kind=concurrent,streams={STREAMS}",
        "--constraint",
        f"kind=max_requests,count={LOAD}",
        "--output",
        f"kind=json,path={out}",
        "--disable-console",
        environment=environment,
    )
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
    answered = [request["output_metrics"]["text_tokens"] for request in requests["successful"]]
    if requests["errored"] or set(answered) != {ANSWER} or len(answered) <= LOAD - STREAMS:
        raise SystemExit(
            f"guidellm: {len(answered)} of {LOAD} requests were answered and "
            f"{len(requests['errored'])} failed; tokens of the "
            f"answers: {answered}"
        )
    print(
        f"guidellm: {len(answered)} of {LOAD} requests answered, {STREAMS} at a time; "
        f"{len(requests['incomplete'])} incomplete"
    )


if __name__ == "__main__":
    main()
