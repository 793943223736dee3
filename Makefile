# One command each: `make demo` shows it, `make test` proves it. Both set up what they need, as root on Debian 12 or 13.
SHELL := /bin/bash
.DEFAULT_GOAL := help
ENGINE ?= simulated
PYTHON ?= /usr/bin/python3
BIN := .venv/bin
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# A fresh home for Ansible's own files, so that nothing installed elsewhere hides a fault of this tree.
export ANSIBLE_HOME := $(CURDIR)/.ansible
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.PHONY: help setup demo demo-down lint unit test test-long bench clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.stamp ## the controller's Python environment, from the lock file

.venv/.stamp: requirements.lock
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq python3 python3-venv; }
	@command -v ssh >/dev/null || { apt-get update -qq && apt-get install -y -qq openssh-client; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	@touch $@

demo: setup ## four lab machines, sixteen verified backends, one endpoint (ENGINE=vllm: real vLLM on CPU)
	$(BIN)/python lab/demo.py --engine $(ENGINE)

demo-down: ## end the demo's lab
	lab/lab down

lint: setup ## ansible-lint (production), ruff, yamllint, luacheck
	$(BIN)/python tests/run.py lint

unit: setup ## parsers, placement, arguments, modules
	$(BIN)/python tests/run.py unit

test: setup ## everything CI runs: lint, unit, role scenarios, cluster scenarios
	$(BIN)/python tests/run.py

test-long: setup ## what takes longer: random kills, soak
	$(BIN)/python tests/run.py long

bench: setup ## the budgets, as ratios within one run
	$(BIN)/python tests/bench.py

clean: ## environment, reports and Ansible's own files (lab caches stay: lab/lab down --caches)
	rm -rf .venv build .ansible .cache .hypothesis .pytest_cache .ruff_cache
