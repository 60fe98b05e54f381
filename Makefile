# make quickstart   install and train a small model that learns to add, then show what it learned
# make test         install and run the tests (make test-all: the slow ones, too)
#
# Everything lives in .venv, made once by the first Python >= 3.11 found; PYTHON=... chooses another.
# jax comes without CUDA unless nvidia-smi finds a GPU; GPU=0 or GPU=1 overrules that.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
PYTHON ?=
GPU ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo 1 || echo 0)
EXTRAS := $(if $(filter 1,$(GPU)),cuda12,)
# Python compiles what it imports, once; all packages together are ten times as much. Unless it may not write bytecode.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --use-pep517 \
       $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.3
export PYTHONHASHSEED := 0# some reasoning-gym tasks depend on it

.PHONY: help quickstart smollm2 miniature report sglang-cpu test test-all test-sglang lint format types clean

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

# --- environment ---------------------------------------------------------------------------------------------------

$(VENV)/made:
	@for python in $(PYTHON) $(if $(PYTHON),,python3.12 python3.11 python3 python3.13 python); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  "$$python" -c 'import ensurepip, venv' 2>/dev/null || { no_venv="$$python"; continue; }; \
	  echo "making $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV); touch $@; exit 0; \
	done; \
	if [ -n "$${no_venv:-}" ]; then \
	  echo "error: $$no_venv has no venv module; on Debian: apt-get install python3-venv" >&2; \
	else \
	  echo "error: no Python >= 3.11 found$(if $(PYTHON), at $(PYTHON)); install one, or name it: make PYTHON=/path/to/python3" >&2; \
	fi; exit 1

$(VENV)/installed: $(VENV)/made pyproject.toml requirements.txt
	@echo "installing brorl_jax $(if $(EXTRAS),with $(EXTRAS),for CPU)"
	@command -v cc >/dev/null || echo "note: no C compiler; reasoning-gym's pycosat comes as source" \
	  "(on Debian: apt-get install build-essential python3-dev)" >&2
	@$(PIP) --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "installing the test tools"
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	@echo "installing the linter and the type checker"
	@$(PIP) --editable '.[dev]'
	@touch $@

# --- runs ----------------------------------------------------------------------------------------------------------

quickstart: $(VENV)/installed
	@$(BIN)/python -m brorl_jax.main --config=configs/quickstart.py --workdir=$(RUNS)/quickstart

models/smollm2-135m/config.json: | $(VENV)/installed
	@$(BIN)/python -m brorl_jax.models.smollm2 --out models/smollm2-135m

smollm2: $(VENV)/installed models/smollm2-135m/config.json
	@$(BIN)/python -m brorl_jax.main --config=configs/smollm2_135m.py --workdir=$(RUNS)/smollm2

miniature: $(VENV)/installed
	@$(BIN)/python -m experiments.miniature --out=$(RUNS)/miniature $(ARGS)

report: $(VENV)/installed
	@$(BIN)/python -m brorl_jax.report $(wildcard $(RUNS)/*)

# --- a real SGLang server on CPUs, for tests (docs/sglang.md) ---------------------------------------------------------

SGLANG := .venv-sglang
SGLANG_PYTHON := python3.11# what the pinned set was tested with
TORCH_INDEX ?=# on the public index torch brings CUDA along; https://download.pytorch.org/whl/cpu does not
SGLANG_PIP := $(SGLANG)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile

sglang-cpu: $(SGLANG)/installed

$(SGLANG)/installed: tools/sglang_cpu/requirements.txt
	@echo "making $(SGLANG): SGLang for CPUs, about 2.4 GB and 3 minutes"
	@$(SGLANG_PYTHON) -m venv --clear $(SGLANG)
	@$(SGLANG_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	@$(SGLANG_PIP) --requirement $<
	@$(SGLANG_PIP) --no-deps sglang==0.5.23
	@env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=tools/sglang_cpu/stubs SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/bin/python -W ignore \
	  -c 'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler' # compiled once: starts are faster
	@touch $@

# --- checks --------------------------------------------------------------------------------------------------------

test: $(VENV)/installed-test
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(VENV)/installed-test
	@$(BIN)/python -m pytest $(ARGS)

test-sglang: $(VENV)/installed-test $(SGLANG)/installed
	@BRORL_SGLANG_REQUIRED=1 $(BIN)/python -m pytest -m sglang tests/rollout/sglang $(ARGS)

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/installed-dev
	@$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(SGLANG) .cache .pytest_cache .ruff_cache .hypothesis *.egg-info
