# Every target sets up what it needs: a virtual environment in .venv with the package and its development tools.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS := -n logical --maxprocesses 4 --dist worksteal
LOWEST := .venv-lowest
FACADE := tests/integration/engine tests/integration/graph tests/integration/pml tests/property/test_counts.py
FLOORS := $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+).*/\1==\2/p' pyproject.toml)

# Tests start many processes: none of them has to compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-kernels nightly torture-durable chaos test-elsewhere test-lowest mutants package-check install check format train-embedded clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(STAMP)  ## Watch three agents debate over one record, and what sharing their KV cache saves
	@$(BIN)/choreo run debate

test: $(STAMP)  ## Run the tests, all but the slow ones
	@$(BIN)/python -m pytest $(WORKERS)

test-slow: $(STAMP)  ## Run the slow tests: much random input, or at length
	@$(BIN)/python -m pytest $(WORKERS) -m slow

test-kernels: $(STAMP)  ## Run what is exact with the kernels of other processors, too
	@$(BIN)/python tests/under_other_kernels.py $(WORKERS)

test-elsewhere: $(STAMP)  ## Run the tests of the engine's facade on engines that are actors of Ray's (OPTIONS="--listed")
	@$(BIN)/python -m pytest -n 1 --engine ray $(OPTIONS) --ignore tests/integration/engine/elsewhere $(FACADE)

mutants: $(STAMP)  ## Break the product in many places, and see that its tests notice (SAMPLE=6: in a few only)
	@$(BIN)/python tests/mutation/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTANTS)

torture-durable: $(STAMP)  ## Kill processes that run threads, 200 times, and see that nothing is lost (OPTIONS="--store postgres --kills 50")
	@PYTHONPATH=tests $(BIN)/python -m torture.durable $(OPTIONS)

chaos: $(STAMP)  ## Kill actors under 100 runs of graphs, and the directory under 20 (resumes; OPTIONS="--engines 20")
	@PYTHONPATH=tests:integrations/ray $(BIN)/python -m torture.chaos $(OPTIONS)

test-lowest: $(LOWEST)/.installed  ## Run all tests on the oldest torch and transformers (downloads 3 GB once)
	@$(LOWEST)/bin/python -m pytest $(WORKERS) -m ''

package-check: $(STAMP)  ## Build the wheels and sdists into dist/, install them where the source is not, and run them
	@$(BIN)/python tests/installation/package_check.py

nightly: $(STAMP)  ## Run what does not gate: slow tests, other kernels, kills and mutants; all of it, whatever fails
	@status=0; for each in test-slow test-kernels chaos mutants; do $(MAKE) --no-print-directory $$each || status=1; done; exit $$status

install: $(STAMP)  ## Create .venv and install the package with its development tools

check: $(STAMP)  ## Format, lint, types, layers, size budget and rooms, without changing anything; all of them, whatever fails
	@$(BIN)/python tests/gate/check.py

format: $(STAMP)  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

train-embedded: $(STAMP)  ## Train the shipped embedded model from scratch (resumes; about 75 minutes on 2 cores)
	@$(BIN)/choreo train embedded --out choreo_agents/models/embedded/weights

clean:  ## Remove the virtual environments and caches
	rm -rf .venv $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "choreo-agents needs Python 3.11 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@cd .venv && bin/choreo --help > /dev/null
	@touch $(STAMP)

# What is pinned for development is kept, but for what has to be old.
$(LOWEST)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(LOWEST) with $(FLOORS) ..."
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@grep -vE '^(torch|transformers|tokenizers)==' constraints.txt > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		-c $(LOWEST)/constraints.txt $(FLOORS) -e '.[dev]'
	@touch $@
