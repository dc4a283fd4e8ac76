# Every target sets up what it needs: a virtual environment in .venv with the package and its development tools.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS := -n logical --maxprocesses 4 --dist worksteal
LOWEST := .venv-lowest
NATIVE := $(wildcard choreo_agents/native/*.[ch]) choreo_agents/native/build_hook.py
FACADE := tests/integration/engine tests/integration/graph tests/integration/pml tests/property/test_counts.py
FLOORS := $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+).*/\1==\2/p' pyproject.toml)

# Tests start many processes: none of them has to compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-kernels torture-durable chaos test-elsewhere test-lowest mutants package-check install check format train-embedded clean
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

install: $(STAMP)  ## Create .venv and install the package with its development tools

check: $(STAMP)  ## Format, lint, types, layers, size budget and rooms, without changing anything
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@cd integrations/langchain && PYTHONPATH=. ../../$(BIN)/lint-imports --no-cache
	@cd integrations/ray && PYTHONPATH=. ../../$(BIN)/lint-imports --no-cache
	@cd integrations/server && PYTHONPATH=. ../../$(BIN)/lint-imports --no-cache
	@$(BIN)/python tests/architecture/size_budget.py
	@$(BIN)/python tests/architecture/rooms.py

format: $(STAMP)  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

train-embedded: $(STAMP)  ## Train the shipped embedded model from scratch (resumes; about 75 minutes on 2 cores)
	@$(BIN)/choreo train embedded --out choreo_agents/models/embedded/weights

clean:  ## Remove the virtual environments and caches
	rm -rf .venv $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
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
	@grep -vE '^(torch|transformers|tokenizers|triton)==' constraints.txt > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		-c $(LOWEST)/constraints.txt $(FLOORS) -e '.[dev]'
	@touch $@

.PHONY: test-triton test-browser docs docs-serve notebook page page-check gpu gpu-wheels torture side-channel wheel
TRITON := tests/conformance/test_triton.py tests/conformance/test_waits.py \
	tests/unit/runtime/test_passes.py tests/unit/runtime/test_ahead.py tests/unit/models/test_fused.py \
	tests/unit/sampling/test_lottery.py
DOCS := mkdocs-material 'mkdocstrings[python]' mkdocs-gen-files
DEVICE := cuda
WHEELS_FOR := 3.12

test-triton: $(STAMP)  ## Run the kernels for GPUs without one: interpreted, and compiled for three of them (installs triton)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt 'triton>=3.6'
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest $(WORKERS) $(TRITON)
	@$(BIN)/python -m pytest $(WORKERS) tests/conformance/test_triton_compiled.py

ifdef WHEELS
gpu:  ## Run what a GPU is asked first, at most 8 minutes (DEVICE=cpu: the dry run; WHEELS=folder: offline, on what the machine has)
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/gpu/site $(WHEELS)/*.whl
	@PYTHONPATH=build/gpu/site:.:tests $(PYTHON) -m gpu.run --device $(DEVICE)

gpu-wheels:  ## Fetch into WHEELS=folder what a GPU machine lacks that has torch, transformers and triton and no network
	@mkdir -p $(WHEELS)
	@$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(WHEELS_FOR) --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
		-c constraints.txt -d $(WHEELS) -r tests/gpu/wheels.txt
else
gpu: $(STAMP)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(if $(filter cpu,$(DEVICE)),-c constraints.txt) 'triton>=3.6'
	@PYTHONPATH=tests $(BIN)/python -m gpu.run --device $(DEVICE)
endif

test-browser: $(STAMP)  ## Run the tests of the page of a run in a headless Chromium (on Debian: apt-get install chromium)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt playwright
	@CHOREO_BROWSER=1 $(BIN)/python -m pytest tests/browser

docs: $(STAMP)  ## Build the documentation as a site into site/, strictly; once set up, that needs no network
	@$(BIN)/python -c 'import material, mkdocs_gen_files, mkdocstrings' 2> /dev/null || $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt $(DOCS)
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python docs/_site/check.py

docs-serve: $(STAMP)  ## Show the documentation at http://127.0.0.1:8001, and again whenever a page changes
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt $(DOCS)
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8001

notebook: $(STAMP)  ## Execute the notebook of examples/
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt nbclient ipykernel
	@$(BIN)/jupyter execute examples/notebooks/first_graph.ipynb

page:  ## Build the page of a run anew from its sources (needs npm)
	@mkdir -p build/page && cp -R choreo_agents/inspection/page/. build/page
	@cd build/page && npm ci --silent --no-audit --no-fund && node build.mjs ../../choreo_agents/inspection/run.html

page-check: page  ## See that the page which is shipped is what its sources make
	@git diff --exit-code --stat choreo_agents/inspection/run.html

torture: $(STAMP)  ## Run random graphs of tenants with faults, cancelled and resumed, and rude clients, for ten minutes (OPTIONS="--seconds 60 --seed 3")
	@PYTHONPATH=tests:integrations/server $(BIN)/python -m torture.everything $(OPTIONS)

side-channel: $(STAMP)  ## See whether the time to a first token tells a tenant what another has encoded (OPTIONS="--pairs 100")
	@PYTHONPATH=tests:integrations/server $(BIN)/python -m torture.side_channel $(OPTIONS)

wheel: $(STAMP)  ## Build the wheel whose kernels run on any Linux on x86-64 into dist/, and check that they do (downloads a compiler once)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@CHOREO_AGENTS_NATIVE=manylinux $(BIN)/python -m hatchling build -t wheel -d dist
	@$(BIN)/auditwheel show dist/choreo_agents-*manylinux*.whl
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
