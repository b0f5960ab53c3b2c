# Everything starts from a bare Python >= 3.11: `make demo` and `make test` set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# The number of processes in which `make test` and `make test-envs` run tests.
JOBS ?= 2
STAMP := $(VENV)/.ready
# The address and the model of `make sglang`. It ignores HOST in the environment, which some shells set.
HOST = 127.0.0.1
PORT = 30000
MODEL =

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

# The tests that need nothing more than `make setup` and bubblewrap, as in pyproject.toml.
HERE := not sglang and not chaos and not external and not frameworks and not clients and not ray and not gpu

# Cells of the matrices that `make chaos`, `make test-envs` and `make test-sglang` run: all, or short.
CELLS ?= all

.PHONY: setup sandbox-install containers-install browser-install envs-install frameworks-install clients-install demo demo-code demo-distributed demo-lora demo-math demo-ray demo-sglang demo-terminal smoke test test-fast test-processes test-envs test-frameworks test-clients test-gpu test-ray test-sglang chaos check docs build bench sglang sglang-install clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "agentrl needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## create .venv and install agentrl with its development tools

demo: setup  ## train the bundled calculator agent on this machine's CPU and plot its learning curve (SEED=1 for another seed)
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED)

demo-lora: setup  ## run the demo with a LoRA adapter of rank 8, which servers take beside their weights (SEED=1 for another seed)
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED) --name demo-lora --trainer.lora '{rank: 8, alpha: 16}' --trainer.lr 2e-3 --sync.adapter adapter

demo-math: setup  ## train a tiny model on math with feedback on this machine's CPU (SEED=1 for another seed)
	$(BIN)/python -m agentrl_workflows.math_demo.demo --seed $(SEED)

demo-sglang: setup sglang-install  ## run the demo through a real SGLang on this machine's CPU
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED) --name demo-sglang --inference.backend sglang

demo-distributed: setup  ## run the demo with two trainer processes and two servers
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED) --name demo-distributed --trainer.parallel.dp 2 --inference.servers 2

demo-ray: setup  ## run the demo on a Ray cluster of three nodes on this machine, one of which is killed; Ray is installed first
	$(BIN)/pip install --quiet -c constraints.txt -e '.[ray]'
	$(BIN)/python -m agentrl_workflows.calculator.ray_demo --seed $(SEED)

demo-code: setup sandbox-install  ## train the bundled code agent, whose programs run in the sandbox against hidden tests (SEED=1)
	$(BIN)/python -m agentrl_workflows.code_demo.demo --seed $(SEED)

demo-terminal: setup sandbox-install  ## train the terminal agent on Harbor tasks in containers, on this machine's CPU (SEED=1)
	$(BIN)/python -m agentrl_workflows.terminal_demo.demo --seed $(SEED)

smoke: setup  ## run the demo's smallest variant, in under a minute
	$(BIN)/python -m agentrl_workflows.calculator.demo --smoke --seed $(SEED)

test: setup sandbox-install  ## run all tests that need no real SGLang, in JOBS=2 processes: test-fast and test-processes
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

test-fast: setup  ## run the tests that start no process
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not processes and $(HERE)"

test-processes: setup sandbox-install  ## run the tests that start processes
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "processes and $(HERE)"

test-envs: setup envs-install browser-install containers-install  ## run the tests of environments that need large packages or servers, which are installed first
	$(BIN)/pip install --quiet -c constraints.txt -e '.[browser,minigrid,reasoning,tables,textarena,trackers]' atif datasets mcp-server-time
	$(BIN)/python -m pytest -m "external$(if $(filter short,$(CELLS)), and not long)" --numprocesses $(JOBS) --dist worksteal tests

test-frameworks: setup frameworks-install  ## run the agents of other frameworks (examples/frameworks), which are installed first
	$(BIN)/python -m pytest -m frameworks tests

test-clients: setup clients-install  ## play episodes with real clients (Codex, Claude Code, SDKs), which are installed first; writes their table
	$(BIN)/python -m pytest -m clients --numprocesses $(JOBS) --dist worksteal tests
	$(BIN)/python -m tests.clients.table

test-gpu: setup  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests

test-ray: setup  ## run the tests of the Ray launcher on a cluster of three nodes on this machine; Ray is installed first
	$(BIN)/pip install --quiet -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m ray tests

test-sglang: setup sglang-install  ## run the tests that need a real SGLang, which is installed first if it is missing
	$(BIN)/python -m pytest -m "sglang$(if $(filter short,$(CELLS)), and not long)" tests

chaos: setup  ## the fault matrix on real processes, 15 minutes; writes docs/reliability.md (CELLS=short: nine cells)
	$(BIN)/python -m pytest tests/chaos -m "chaos$(if $(filter short,$(CELLS)), and short)" --numprocesses $(JOBS)
	$(if $(filter short,$(CELLS)),,$(BIN)/python -m tests.chaos.table)

check: setup  ## check style, format, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: setup  ## run every snippet of the documentation, and build its site into site/
	$(BIN)/python -m pytest tests/contract/test_docs.py tests/contract/test_site.py
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/index.html; $(BIN)/mkdocs serve shows it with its search"

build: setup  ## build the wheel and the sdist
	$(BIN)/python -m build --no-isolation

bench: setup sglang-install  ## run every benchmark; results go to benchmarks/results/
	for file in benchmarks/[a-z]*.py; do $(BIN)/python -m benchmarks.$$(basename $$file .py) || exit 1; done

sglang:  ## serve a model with a real SGLang on this CPU, installed on first use (HOST=, PORT=, MODEL=, a tiny Qwen3 by default)
	@$(PYTHON) scripts/sglang_serve.py --host "$(HOST)" --port "$(PORT)" --model "$(MODEL)"

sglang-install:  ## install SGLang for CPUs into .sglang-venv (2.8 GB), where agentrl finds it
	@PYTHON=$(PYTHON) bash scripts/sglang_install.sh

browser-install:  ## install Chromium for the browser environment, from the system's packages
	@bash scripts/chromium_install.sh

sandbox-install:  ## install bubblewrap, which isolates code that models write, from the system's packages
	@bash scripts/bubblewrap_install.sh

containers-install:  ## install docker, podman and gVisor from the system's packages, and make an image, for the tests of containers
	@bash scripts/containers_install.sh

envs-install:  ## install what the tests of environments run against into .envs-venv (850 MB)
	@PYTHON=$(PYTHON) bash scripts/envs_install.sh

frameworks-install:  ## install agent frameworks into .frameworks-venv, for openai 3 and for openai 2
	@PYTHON=$(PYTHON) bash scripts/frameworks_install.sh

clients-install:  ## install clients of model APIs into .clients-venv and .clients-node (2 GB; needs npm)
	@PYTHON=$(PYTHON) bash scripts/clients_install.sh

clean:  ## remove the files that builds and tests leave behind
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
