# make demo   tune, write a profile and decode with it, on the model that comes with the package
# make test   lint, type-check, test
# make thorough   the tests that decode for long, which `make test` leaves to CI
# make gpu    the GPU tests, and a benchmark of a synthetic Llama-2-13B; by hand, where there is a GPU
# All install what they need into .venv/ first. PYTHON=… chooses the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
DEMO := build/demo

.PHONY: demo gpu test thorough slow clean

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "skipsearch needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

gpu: .venv/installed
	@mkdir -p build
	$(BIN)/python -m pytest -m gpu -s
	$(BIN)/skipsearch bench --model synthetic:llama-2-13b --device cuda --engine graph --peers plain,skip,plain@lean,hf-generate,hf-compile --prompts 4 --costs --contexts 128,1024,4000 --picture build/gpu.png

demo: .venv/installed
	@mkdir -p $(DEMO)
	$(BIN)/skipsearch tune --model demo --task pycode --budget 30s --threads 1 --out $(DEMO)/profile.yaml --force
	$(BIN)/skipsearch decode --profile $(DEMO)/profile.yaml --prompt 'def parse_arguments(argv=None):' --end-on-repeat 6 --check

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadgroup

thorough: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m thorough

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
