# Every target sets up what it needs: a virtual environment in .venv with the package and its development tools.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test install check format train-embedded clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(STAMP)  ## Watch three agents debate over one record, and what sharing their KV cache saves
	@$(BIN)/choreo run debate

test: $(STAMP)  ## Run all tests
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

install: $(STAMP)  ## Create .venv and install the package with its development tools

check: $(STAMP)  ## Format, lint, types, layers and size budget, without changing anything
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python tests/architecture/size_budget.py

format: $(STAMP)  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

train-embedded: $(STAMP)  ## Train the shipped embedded model from scratch (resumes; about 75 minutes on 2 cores)
	@$(BIN)/choreo train embedded --out choreo_agents/models/embedded/weights

clean:  ## Remove the virtual environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "choreo-agents needs Python 3.11 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@cd .venv && bin/choreo --help > /dev/null
	@touch $(STAMP)
