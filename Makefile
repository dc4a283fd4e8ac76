# Every target sets up what it needs, in three layers over one .venv: the product, what gates a change, all else.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
PRODUCT := .venv/.product
TEST := .venv/.test
NIGHTLY := .venv/.nightly
WORKERS := -n 2 --dist worksteal
LOWEST := .venv-lowest
FACADE := tests/integration/engine tests/integration/graph tests/integration/pml tests/property/test_counts.py
FLOORS := $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+).*/\1==\2/p' pyproject.toml)
N := 50

# Tests start many processes: none of them has to compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

# Packages are compiled when they are first imported: most modules never are. Progress is a line for every tenth package.
pip = PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --no-compile --progress-bar off --disable-pip-version-check -c constraints.txt $(1) 2>&1 \
	| tee .venv/install.log | awk '/^ *Collecting/ && ++found % 10 == 0 { print "  found " found " packages"; fflush() } \
	/^Installing/ { print "  installing " NF - 3 " packages"; fflush() }' || { tail -n 30 .venv/install.log; exit 1; }

.PHONY: help demo test gate check repeat nightly test-slow test-kernels torture-durable chaos test-elsewhere test-lowest mutants package-check install format train-embedded clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(PRODUCT)  ## Watch three agents debate over one record, and what sharing their KV cache saves
	@$(BIN)/choreo run debate

test: $(TEST)  ## Run the tests that gate a change
	@$(BIN)/python tests/gate/run.py test

check: $(TEST)  ## Run the static checks: types, layers, format, lint, sizes; all of them, whatever fails
	@$(BIN)/python tests/gate/run.py check

gate: $(TEST)  ## Run both, as .ci/run does, and print one table
	@$(BIN)/python tests/gate/run.py

repeat: $(TEST)  ## Run one test N times in fresh processes, beside two busy loops (TEST=tests/...::test_... N=50)
	@$(BIN)/python tests/gate/repeat.py '$(value TEST)' $(N)

nightly: $(NIGHTLY)  ## Run what does not gate, whatever fails; goes on where it was cut off (ROWS="parity slow")
	@$(BIN)/python tests/gate/nightly.py $(ROWS)

test-slow: $(NIGHTLY)  ## Run the slow tests: much random input, or at length
	@$(BIN)/python -m pytest $(WORKERS) -m slow

test-kernels: $(TEST)  ## Run what is exact with the kernels of other processors, too
	@$(BIN)/python tests/under_other_kernels.py $(WORKERS)

test-elsewhere: $(NIGHTLY)  ## Run the tests of the engine's facade on engines that are actors of Ray's (OPTIONS="--listed")
	@$(BIN)/python -m pytest -n 1 --engine ray $(OPTIONS) --ignore tests/integration/engine/elsewhere $(FACADE)

mutants: $(TEST)  ## Break the product in many places, and see that its tests notice (SAMPLE=6: in a few only)
	@$(BIN)/python tests/mutation/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTANTS)

torture-durable: $(NIGHTLY)  ## Kill processes that run threads, 200 times, and see that nothing is lost (OPTIONS="--store postgres --kills 50")
	@PYTHONPATH=tests $(BIN)/python -m torture.durable $(OPTIONS)

chaos: $(NIGHTLY)  ## Kill actors under 100 runs of graphs, and the directory under 20 (resumes; OPTIONS="--engines 20")
	@PYTHONPATH=tests:integrations/ray $(BIN)/python -m torture.chaos $(OPTIONS)

test-lowest: $(LOWEST)/.installed  ## Run all tests on the oldest torch and transformers (downloads 3 GB once)
	@$(LOWEST)/bin/python -m pytest $(WORKERS) -m ''

package-check: $(NIGHTLY)  ## Build the wheels and sdists into dist/, install them where the source is not, and run them
	@$(BIN)/python tests/installation/package_check.py

install: $(NIGHTLY)  ## Create .venv with the package and all that its development needs

format: $(TEST)  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

train-embedded: $(PRODUCT)  ## Train the shipped embedded model from scratch (resumes; about 75 minutes on 2 cores)
	@$(BIN)/choreo train embedded --out choreo_agents/models/embedded/weights

clean:  ## Remove the virtual environments and caches
	rm -rf .venv $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(PRODUCT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "choreo-agents needs Python 3.11 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv: choreo-agents and what it needs, about 1.4 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(call pip,-e .)
	@touch $@

$(TEST): $(PRODUCT)
	@echo "setting up .venv: what tests and checks need"
	@$(call pip,-e '.[test]')
	@touch $@

$(NIGHTLY): $(TEST)
	@echo "setting up .venv: Ray, PostgreSQL, quantisation, telemetry"
	@$(call pip,-e '.[nightly]')
	@touch $@

# What is pinned for development is kept, but for what has to be old.
$(LOWEST)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(LOWEST) with $(FLOORS) ..."
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@grep -vE '^(torch|transformers|tokenizers)==' constraints.txt > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		-c $(LOWEST)/constraints.txt $(FLOORS) -e '.[nightly]'
	@touch $@
