# Every command of the project; CI calls the same ones. `make` lists them.
PYTHON ?= python3.11
QUESTION ?= What is the capital of France?
PYTEST_ARGS ?=
# Half of the tests' time is waiting: files of tests run in so many processes at once.
TEST_PROCESSES ?= 2

BIN := .venv/bin
ENGINE_BIN := .venv-engine/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-engine model demo up down test check chaos takeover fmt bench bench-scheduling lock clean python

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "setup: Python 3.11 is needed: install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }

setup: python  ## Make .venv: everything but vLLM
	@$(PYTHON) infra/setup/make_env.py core

setup-engine: python  ## Make .venv-engine: vLLM, for the NVIDIA GPU if there is one, else for the CPU
	@$(PYTHON) infra/setup/make_env.py engine

model: setup-engine  ## Prepare the demo's model once, in ~/.cache/headrace
	@$(ENGINE_BIN)/python -P -m infra.model_prep

demo: setup model  ## Start everything with real vLLM and ask a question; then the chat page is open
	@$(BIN)/headrace up --ask "$(QUESTION)"

up: setup model  ## Start everything with real vLLM
	@$(BIN)/headrace up

down:  ## Stop what `make up` or `make demo` started elsewhere
	@$(BIN)/headrace down

test: setup model  ## All tests
	@infra/setup/test_tools.sh
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

MINUTES ?= 15
REQUESTS ?= 2000
SEED ?= 1
CHAOS_ARGS ?=

chaos: setup  ## Kill and freeze everything under load for MINUTES, with REQUESTS and SEED; nothing may be lost
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) --requests $(REQUESTS) --seed $(SEED) \
	  --report .headrace/chaos-$(SEED).json $(CHAOS_ARGS)

takeover: setup model  ## Kill and freeze real vLLM workers in the middle of replies; takes minutes
	@$(BIN)/python -m pytest -s tests/integration/long_vllm_takeover.py tests/integration/long_vllm_tier.py tests/chaos/long_chaos_takeover.py

check: setup  ## Format, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: setup  ## Format, and fix what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## Measure the pipeline beside its engine alone
	@$(BIN)/python -m bench

bench-scheduling: setup  ## Compare scheduling policies under twice the load that can be served (virtual time)
	@$(BIN)/python -m bench scheduling

# Versions stay as they are unless UPGRADE=--upgrade is given. PyTorch's CPU build is found where pip
# finds it (PIP_FIND_LINKS or an index of your own in UV_EXTRA_INDEX_URL) and is left out of the lock.
UV := $(BIN)/uv pip compile -q pyproject.toml --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-annotate --no-header $(UPGRADE)
ENGINE_UV := $(UV) --python-platform x86_64-manylinux_2_28 --extra model

lock: setup  ## Resolve requirements/*.lock again (UPGRADE=--upgrade for newer versions)
	@$(UV) --universal --extra serve --extra dev -o requirements/dev.lock
	@$(UV) --universal --extra serve -c requirements/dev.lock -o requirements/serve.lock
	@$(ENGINE_UV) --extra cpu --no-emit-package torch \
	  $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o requirements/engine-cpu.lock
	@$(ENGINE_UV) --extra gpu -o requirements/engine-gpu.lock

clean:  ## Remove what the commands made here (environments included)
	@rm -rf .venv .venv-engine build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
	  .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
