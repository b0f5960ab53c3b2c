# Everything starts from a bare Python >= 3.11: `make demo` and `make test` set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# More flags of `make demo-real`, such as --harder.
ARGS =
# The number of processes in which `make test` and `make test-envs` run tests.
JOBS ?= 2
# Makes environments: what clones share stands in $AGENTRL_VENVS, by default in the user's cache.
ENVIRONMENTS := $(PYTHON) scripts/environments.py
# The address and the model of `make sglang`. It ignores HOST in the environment, which some shells set.
HOST = 127.0.0.1
PORT = 30000
MODEL =

# A new environment holds no bytecode: without it, each process of a test would compile torch and transformers.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

# The tests that need an installation of their own, which other targets run.
ELSEWHERE := not sglang and not chaos and not frameworks and not clients and not ray and not gpu
# The tests of `make test`, as in pyproject.toml.
HERE := not long and not nightly and not external and $(ELSEWHERE)
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

# What `make chaos`, `make test-envs` and `make test-sglang` run: all, or short, which leaves out what is `nightly`.
CELLS ?= all
SHORT := $(if $(filter short,$(CELLS)), and not nightly)
# The package whose tests `make lane` runs, and what each needs beside `.venv`.
PACKAGE = agentrl_envs
NEEDS_agentrl_doors := clients-install
NEEDS_agentrl_envs := envs-install browser-install
NEEDS_agentrl_sandbox := containers-install
NEEDS_agentrl_viewer := browser-install

.PHONY: setup sandbox-install containers-install browser-install envs-install frameworks-install clients-install demo demo-code demo-distributed demo-lora demo-math demo-ray demo-real demo-sglang demo-terminal smoke test test-fast test-starts test-marks test-core lane lane-install test-all test-conformance test-envs test-frameworks test-clients test-gpu test-ray test-sglang chaos check docs build bench sglang sglang-install clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 12

setup:  ## create .venv and install agentrl with its development tools
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "agentrl needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(ENVIRONMENTS) main

demo: setup  ## train the bundled calculator agent on this machine's CPU and plot its learning curve (SEED=1 for another seed)
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED)

demo-real: setup  ## train a pretrained model to use a tool; it is fetched once, 93 MB (SEED=1, ARGS="--harder --lora", --control)
	$(BIN)/python -m agentrl_workflows.pretrained_demo.demo --seed $(SEED) $(ARGS)

demo-lora: setup  ## run the demo with a LoRA adapter of rank 8, which servers take beside their weights (SEED=1 for another seed)
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED) --name demo-lora --trainer.lora '{rank: 8, alpha: 16}' --trainer.lr 2e-3 --sync.adapter adapter

demo-math: setup  ## train a tiny model on math with feedback on this machine's CPU (SEED=1 for another seed)
	$(BIN)/python -m agentrl_workflows.math_demo.demo --seed $(SEED)

demo-sglang: setup sglang-install  ## run the demo through a real SGLang on this machine's CPU
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED) --name demo-sglang --inference.backend sglang

demo-distributed: setup  ## run the demo with two trainer processes and two servers
	$(BIN)/python -m agentrl_workflows.calculator.demo --seed $(SEED) --name demo-distributed --trainer.parallel.dp 2 --inference.servers 2

demo-ray: setup  ## run the demo on a Ray cluster of three nodes on this machine, one of which is killed; Ray is installed first
	@$(ENVIRONMENTS) ray
	$(BIN)/python -m agentrl_workflows.calculator.ray_demo --seed $(SEED)

demo-code: setup sandbox-install  ## train the bundled code agent, whose programs run in the sandbox against hidden tests (SEED=1)
	$(BIN)/python -m agentrl_workflows.code_demo.demo --seed $(SEED)

demo-terminal: setup sandbox-install  ## train the terminal agent on Harbor tasks in containers, on this machine's CPU (SEED=1)
	$(BIN)/python -m agentrl_workflows.terminal_demo.demo --seed $(SEED)

smoke: setup  ## run the demo's smallest variant, in under a minute
	$(BIN)/python -m agentrl_workflows.calculator.demo --smoke --seed $(SEED)

test: setup sandbox-install  ## run the tests that need nothing more and no minutes, in JOBS=2 processes: test-fast and test-starts
	$(PYTEST)

test-fast: setup  ## run the tests that start no process
	$(PYTEST) -m "not starts and $(HERE)"

test-starts: setup sandbox-install  ## run the tests that start processes
	$(PYTEST) -m "starts and $(HERE)"

test-marks: setup  ## run all tests without starting a process, and find marks `starts` without a need
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --refuse-starts -m "not external and $(ELSEWHERE)"

test-core: setup sandbox-install  ## run the tests of the core, without those of companions
	$(PYTEST) $$($(PYTHON) -m scripts.lanes agentrl)

lane-install: setup sandbox-install $(NEEDS_$(PACKAGE))
	@$(ENVIRONMENTS) external

lane: lane-install  ## run all tests of PACKAGE=agentrl_envs, with those that need large packages, which are installed first
	$(PYTEST) -m "not nightly and $(ELSEWHERE)" $$($(PYTHON) -m scripts.lanes $(PACKAGE))
	$(if $(filter agentrl_doors,$(PACKAGE)),$(MAKE) test-clients)

test-all: setup  ## run everything: all targets of tests but test-gpu, with what is `nightly`
	for target in test test-envs test-clients test-frameworks test-sglang test-ray chaos; do $(MAKE) $$target CELLS=all || exit 1; done

test-envs: setup sandbox-install envs-install browser-install containers-install  ## run the tests that need large packages, servers or minutes, which are installed first
	@$(ENVIRONMENTS) external
	$(PYTEST) -m "(external or long or nightly) and $(ELSEWHERE)$(SHORT)" tests

test-frameworks: setup frameworks-install  ## run the agents of other frameworks (examples/frameworks), which are installed first
	$(BIN)/python -m pytest -m frameworks tests

test-clients: setup clients-install  ## play episodes with real clients (Codex, Claude Code, SDKs), which are installed first; writes their table
	$(PYTEST) -m clients tests
	$(BIN)/python -m tests.clients.table

test-gpu: setup  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests

test-ray: setup sandbox-install  ## run the tests of the Ray launcher on a cluster of three nodes on this machine; Ray is installed first
	@$(ENVIRONMENTS) ray
	$(BIN)/python -m pytest -m ray tests

test-sglang: setup sglang-install  ## run the tests that need a real SGLang, which is installed first if it is missing
	$(BIN)/python -m pytest -m "sglang$(SHORT)" tests

test-conformance: setup sglang-install  ## run the conformance suite against a real SGLang
	$(BIN)/python -m pytest -m "sglang and not nightly" tests/conformance

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
	@$(ENVIRONMENTS) docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/index.html; $(BIN)/mkdocs serve shows it with its search"

build: setup  ## build the wheel and the sdist
	$(BIN)/python -m build --no-isolation

bench: setup sglang-install  ## run every benchmark; results go to benchmarks/results/
	for file in benchmarks/[a-z]*.py; do $(BIN)/python -m benchmarks.$$(basename $$file .py) || exit 1; done

sglang:  ## serve a model with a real SGLang on this CPU, installed on first use (HOST=, PORT=, MODEL=, a tiny Qwen3 by default)
	@$(PYTHON) scripts/sglang_serve.py --host "$(HOST)" --port "$(PORT)" --model "$(MODEL)"

sglang-install:  ## install SGLang for CPUs into .sglang-venv (2.8 GB), where agentrl finds it
	@$(ENVIRONMENTS) sglang

browser-install:  ## install Chromium for the browser environment, from the system's packages
	@bash scripts/chromium_install.sh

sandbox-install:  ## install bubblewrap, which isolates code that models write, from the system's packages
	@bash scripts/bubblewrap_install.sh

containers-install:  ## install docker, podman and gVisor from the system's packages, and make an image, for the tests of containers
	@bash scripts/containers_install.sh

envs-install:  ## install what the tests of environments run against into .envs-venv (850 MB)
	@$(ENVIRONMENTS) envs

frameworks-install:  ## install agent frameworks into .frameworks-venv, for openai 3 and for openai 2
	@$(ENVIRONMENTS) frameworks

clients-install:  ## install clients of model APIs into .clients-venv and .clients-node (2 GB; needs npm)
	@$(ENVIRONMENTS) clients

clean:  ## remove the files that builds and tests leave behind
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@echo "The environments of this clone: rm -rf .venv .sglang-venv .envs-venv .frameworks-venv .clients-venv .clients-node"
	@echo "What all clones share: rm -rf $$($(ENVIRONMENTS) --where)"
