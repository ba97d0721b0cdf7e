# make demo   tune, write a profile and decode with it, on the model that comes with the package
# make test   lint code, texts and words, type-check, test
# make lint   the first part of make test: code, texts, words, types
# make tables   rewrite the tables in docs/ that come from the code and from results, and the picture in README
# make thorough   the tests that decode for long, which `make test` leaves out; CI runs those of losslessness and of shared searches
# make real   by hand: fetch a pretrained model (98 MB), tune it on chats, decode with it and compare with llama.cpp; under 10 minutes on 2 cores, results in build/real/
# make real-large   by hand: the same with a model of 1.5 B parameters (1.1 GB in 22 packages)
# make test-large   by hand: the tests that need this model; 9 GB of memory
# make real-short   fetch the same model and run the tests that need it; CI does so
# make gpu    by hand, where there is a GPU: its tests, benchmarks of models of 8 M to 13 B parameters, a search; results in build/gpu/
# All install what they need into .venv/ first. PYTHON=… chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
DEMO := build/demo
GPU := build/gpu

.PHONY: demo real real-large test-large real-short gpu lint tables test thorough slow clean

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "skipsearch needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# A step that fails does not stop the next ones, so that one run shows as much as it can. DEVICE=cpu rehearses the commands.
DEVICE ?= cuda
SHAPES ?= demo synthetic:22x2048 synthetic:llama-2-7b synthetic:llama-2-13b
SYSTEMS_cuda := plain@graph,plain@lean,plain@hf,hf-generate,hf-compile
SYSTEMS_cpu := plain@lean,plain@hf,hf-generate
gpu: .venv/installed
	@mkdir -p $(GPU)
	-$(BIN)/python -m pytest -m gpu -s --junit-xml $(GPU)/tests.xml
	-for shape in $(SHAPES); do $(BIN)/skipsearch bench run --model $$shape --device $(DEVICE) --dtype bfloat16 --systems $(SYSTEMS_$(DEVICE)) --prompts 2 --repeats 2 --costs --contexts 128,1024,4000 --json > $(GPU)/$$(echo $$shape | tr : -).json; done
	-for task in pycode prose; do $(BIN)/skipsearch tune --model demo --task $$task --device $(DEVICE) --budget 2m --out $(GPU)/$$task.yaml --force; done

demo: .venv/installed
	@mkdir -p $(DEMO)
	$(BIN)/skipsearch tune --model demo --task pycode --budget 90s --threads 1 --out $(DEMO)/profile.yaml --force
	$(BIN)/skipsearch decode --profile $(DEMO)/profile.yaml --prompt 'def parse_arguments(argv=None):' --max-new-tokens 96 --end-on-repeat 8 --side-by-side

LARGE := qwen2.5-coder-1.5b-instruct-gguf
real: .venv/installed
	$(BIN)/python tools/real_model.py

real-large: .venv/installed
	$(BIN)/python tools/real_model.py --model $(LARGE)

test-large: .venv/installed
	$(BIN)/python tools/real_model.py --fetch-only --model $(LARGE)
	$(BIN)/python -m pytest -m large

real-short: .venv/installed
	$(BIN)/python tools/real_model.py --fetch-only
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m real tests/test_real_model.py tests/test_real_clients.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python tools/check_text.py
	$(BIN)/python tools/check_words.py
	$(BIN)/mypy

tables: .venv/installed
	PYTHONPATH=.:tests $(BIN)/python -m docs.tables

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

thorough: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'thorough and not slow' $(TESTS) || \
		{ [ $$? = 5 ] && ls -d $(TESTS) > /dev/null && echo "no test of $(TESTS) is marked thorough"; }

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
