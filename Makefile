# Everything here sets up what it needs, in .venv and (for the C parts of bench and for the VM) by apt.
# `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
SETUP := packaging/setup.sh

ENGINE ?= vllm
PORT ?= 8000
STATE ?= $(or $(XDG_STATE_HOME),$(HOME)/.local/state)/seedance
export ENGINE MODEL PORT STATE PREFIX DESTDIR SYSTEM_PYTHON PURGE WHEELHOUSE

.PHONY: help
help: ## This list
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

.PHONY: run
run: ## Serve a model: ENGINE=vllm|synthetic MODEL=hub-name|path|file.gguf PORT=8000 STATE=dir
	@packaging/prepare.sh
	@exec .venv/bin/seedanced --config "$(STATE)/seedanced.toml" --hints

# --- tests --------------------------------------------------------------------------------------------------------

# LAYERS="unit component" runs these alone; EXPECT="vm e2e" fails when one of these was skipped.
.PHONY: test
test: ## All test layers, in order, up to the first that fails: LAYERS="..." EXPECT="..."
	@$(SETUP) base dev bpf
	@$(MAKE) bpf
	@$(PY) tests/layers.py --expect "$(EXPECT)" $(LAYERS)

.PHONY: test-bpf
test-bpf: bpf ## BPF programs: as root, on a kernel that loads them
	@$(SETUP) base dev
	@$(PY) tests/layers.py bpf

.PHONY: lint
lint: ## Formatting, ruff, mypy
	@$(SETUP) base dev
	@$(PY) tests/layers.py lint

.PHONY: format
format: ## Put the code into the form that lint asks for
	@$(SETUP) base dev
	@.venv/bin/ruff check --fix-only --quiet . && .venv/bin/ruff format --quiet .

.PHONY: test-vm
test-vm: bpf ## Under QEMU: the ring and the wheels on a baseline processor, the service in a Debian 13: KERNEL=package
	@$(SETUP) base dev vm
	@PYTHONPATH=tests $(PY) -m vm.run $(if $(KERNEL),--kernel $(KERNEL))
	@PYTHONPATH=tests $(PY) -m vm.systemd_run

AUTOBAHN := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/seedance/autobahn

.PHONY: test-autobahn
test-autobahn: ## The Autobahn WebSocket suite against the worker's echo route: CASES="1.* 9.1.1"
	@$(SETUP) base dev
	@packaging/install_autobahn.sh $(AUTOBAHN)
	@$(PY) tests/autobahn/serve.py --wstest $(AUTOBAHN)/wstest --output build/autobahn \
		$(if $(CASES),--cases $(CASES))

# --- packaging ----------------------------------------------------------------------------------------------------

.PHONY: bpf
bpf: ## bpf/*.bpf.o, without root; CLANG=clang takes that compiler instead of the one from the package index
	@$(SETUP) base bpf
	@$(PY) packaging/build_bpf.py

# By way of the sdist: a wheel built straight from the checkout would also hold what a stale build/ still has.
.PHONY: wheel
wheel: bpf ## dist/seedance-*.whl
	@$(SETUP) base dev
	@rm -rf dist
	@$(PY) -m build --outdir dist . >build-wheel.log 2>&1 || { cat build-wheel.log; rm build-wheel.log; exit 1; }
	@rm -f build-wheel.log; ls dist/*.whl

# The system's Python runs what is installed: SYSTEM_PYTHON=/usr/bin/python3.12 names another one.
.PHONY: install
install: wheel ## As a system service, as root; starts nothing: PREFIX=/usr/local DESTDIR= SYSTEM_PYTHON=
	@packaging/install.sh install

.PHONY: uninstall
uninstall: ## Remove what install made; PURGE=1 for configuration and keys too: PREFIX= DESTDIR=
	@packaging/install.sh uninstall

.PHONY: deb
deb: wheel ## dist/seedance_*.deb for systems with this Python: SYSTEM_PYTHON=
	@packaging/deb.sh

.PHONY: clean
clean: ## Remove what was built here; .venv stays
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis bpf/*.bpf.o tests/bpf/*.bpf.o
	@find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## Remove .venv too
	@rm -rf .venv

-include bench/bench.mk
