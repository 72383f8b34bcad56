# One virtual environment inside the checkout; every target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OPENBLAS_NUM_THREADS := 1

.PHONY: help demo up test test-unit test-engines test-harnesses test-docker test-chaos fuzz check format tiny-model clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.ready: setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip install -q --python $(BIN)/python -e ".[dev,demo]"
	@touch $@

demo: $(VENV)/.ready ## Set up and run the main job: real rollouts on this machine
	$(BIN)/polar demo

up: $(VENV)/.ready ## Start all of Polar on this machine
	$(BIN)/polar up

test: $(VENV)/.ready ## Set up and run the tests
	$(BIN)/pytest -n auto --dist loadfile

test-unit: $(VENV)/.ready ## The quick tests only
	$(BIN)/pytest tests/unit tests/contracts tests/test_architecture.py

fuzz: $(VENV)/.ready ## Fuzz every dialect's reader for a minute each (needs atheris)
	$(BIN)/uv pip install -q --python $(BIN)/python atheris
	for name in openai_chat openai_responses anthropic_messages google_generate; do \
		PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_dialects.py $$name -max_total_time=60 || exit 1; done

test-harnesses: $(VENV)/.ready ## Run every harness preset that installs here, and write docs/harnesses.md's table
	POLAR_TEST_HARNESSES=all $(BIN)/pytest tests/harnesses

test-docker: $(VENV)/.ready ## Install Docker on Debian if it is absent, and run every runtime promise against it (as root)
	command -v dockerd >/dev/null || (apt-get update -q && apt-get install -qy docker.io iptables)
	$(BIN)/pytest tests/contracts/test_runtimes.py tests/contracts/test_runtime_abilities.py tests/unit/runtimes tests/integration/test_docker.py

test-engines: $(VENV)/.ready ## Install a real vLLM for CPU (3 GB) and run every engine promise against it
	POLAR_TEST_ENGINES=vllm $(BIN)/pytest tests/engines

test-chaos: $(VENV)/.ready ## Kill every process in turn, check every promise, and write docs/reliability.md's table
	POLAR_TEST_CHAOS=all $(BIN)/pytest tests/chaos

check: $(VENV)/.ready ## Lint, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

format: $(VENV)/.ready ## Rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tiny-model: $(VENV)/.ready ## Train the tiny checkpoint anew (needs torch, about two minutes)
	$(BIN)/uv pip install -q --python $(BIN)/python -e ".[train]"
	$(BIN)/python -m polar.tiny_engine.train

clean: ## Remove the virtual environment and Polar's own data
	rm -rf $(VENV) .polar
