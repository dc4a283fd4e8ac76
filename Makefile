# Every target sets up what it needs, in three layers over one .venv: the product, what gates a change, all else.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Stamps of the layers: the time when each was set up.
PRODUCT_SET := .venv/.product
TEST_SET := .venv/.test
NIGHTLY_SET := .venv/.nightly
WORKERS := -n 2 --dist worksteal
LOWEST := .venv-lowest
FACADE := tests/integration/engine tests/integration/graph tests/integration/pml tests/property/test_counts.py
FLOORS := $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+).*/\1==\2/p' pyproject.toml)
ENGINE := ray
N := 50
NATIVE := $(wildcard choreo_agents/native/*.[ch]) choreo_agents/native/build_hook.py
TRITON := tests/conformance/test_triton.py tests/conformance/test_waits.py \
	tests/unit/runtime/test_passes.py tests/unit/runtime/test_ahead.py tests/unit/models/test_fused.py \
	tests/unit/sampling/test_draw_kernel.py
DOCS := mkdocs-material 'mkdocstrings[python]' mkdocs-gen-files
DEVICE := cuda
WHEELS_FOR := 3.12

# Tests start many processes: none of them has to compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

# Packages are compiled when they are first imported: most modules never are. Progress is a line for every tenth package.
pip = PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --no-compile --progress-bar off --disable-pip-version-check -c constraints.txt $(1) 2>&1 \
	| tee .venv/install.log | awk '/^ *Collecting/ && ++found % 10 == 0 { print "  found " found " packages"; fflush() } \
	/^Installing/ { print "  installing " NF - 3 " packages"; fflush() }' || { tail -n 30 .venv/install.log; exit 1; }

.PHONY: help demo test gate check weight repeat nightly test-slow test-kernels torture-durable chaos test-elsewhere test-lowest test-triton test-browser docs docs-serve notebook page page-check gpu gpu-wheels torture side-channel wheel mutants package-check install format train-embedded clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(PRODUCT_SET)  ## Watch three agents debate over one record, and what sharing their KV cache saves
	@$(BIN)/choreo run debate

test: $(TEST_SET)  ## Run the tests that gate a change
	@$(BIN)/python tests/gate/run.py test

check: $(TEST_SET)  ## Run the static checks: types, layers, format, lint, weight, words; all of them, whatever fails
	@$(BIN)/python tests/gate/run.py check

weight: $(TEST_SET)  ## Count code lines by package, and lower the numbers of tests/weight.toml, which only fall
	@$(BIN)/python tests/architecture/weight.py --lower

gate: $(TEST_SET)  ## Run both, as .ci/run does, and print one table
	@$(BIN)/python tests/gate/run.py

repeat: export TEST := $(value TEST)
repeat: $(TEST_SET)  ## Run one test N times in fresh processes, beside two busy loops (TEST=tests/...::test_... N=50)
	@$(BIN)/python tests/gate/repeat.py "$$TEST" $(N)

nightly: $(NIGHTLY_SET)  ## Run what does not gate, whatever fails; goes on where it was cut off (ROWS="parity slow")
	@$(BIN)/python tests/gate/nightly.py $(ROWS)

test-slow: $(NIGHTLY_SET)  ## Run the slow tests: much random input, or at length
	@$(BIN)/python -m pytest $(WORKERS) -m slow

test-kernels: $(TEST_SET)  ## Run what is exact with the kernels of other processors, too
	@$(BIN)/python tests/under_other_kernels.py $(WORKERS)

test-elsewhere: $(NIGHTLY_SET)  ## Run the tests of the engine's facade on engines that are actors of Ray's (OPTIONS="--listed", ENGINE=loopback)
	@PYTHONPATH=integrations/ray/tests $(BIN)/python -m pytest -n 1 -p remote_support.plugin --engine $(ENGINE) $(OPTIONS) $(FACADE)

mutants: $(TEST_SET)  ## Break the product in many places, and see that its tests notice (SAMPLE=6: in a few only)
	@$(BIN)/python tests/mutation/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTANTS)

torture-durable: $(NIGHTLY_SET)  ## Kill processes that run threads, 200 times, and see that nothing is lost (OPTIONS="--store postgres --kills 50")
	@PYTHONPATH=tests $(BIN)/python -m torture.durable $(OPTIONS)

chaos: $(NIGHTLY_SET)  ## Kill actors under 100 runs of graphs (resumes; OPTIONS="--engines 20")
	@PYTHONPATH=tests:integrations/ray $(BIN)/python -m torture.chaos $(OPTIONS)

test-lowest: $(LOWEST)/.installed  ## Run all tests on the oldest torch and transformers (downloads 3 GB once)
	@$(LOWEST)/bin/python -m pytest $(WORKERS) -m ''

package-check: $(NIGHTLY_SET)  ## Build the wheels and sdists into dist/, install them where the source is not, and run them
	@$(BIN)/python tests/installation/package_check.py

test-triton: $(NIGHTLY_SET)  ## Run the kernels for GPUs without one: interpreted, and compiled for three of them (installs triton)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt 'triton>=3.6'
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest $(WORKERS) --timeout 900 $(TRITON)
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
gpu: $(NIGHTLY_SET)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(if $(filter cpu,$(DEVICE)),-c constraints.txt) 'triton>=3.6'
	@PYTHONPATH=tests $(BIN)/python -m gpu.run --device $(DEVICE)
endif

test-browser: $(NIGHTLY_SET)  ## Run the tests of the page of a run in a headless Chromium (on Debian: apt-get install chromium)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt playwright
	@CHOREO_BROWSER=1 $(BIN)/python -m pytest tests/browser

docs: $(NIGHTLY_SET)  ## Build the documentation as a site into site/, strictly; once set up, that needs no network
	@$(BIN)/python -c 'import material, mkdocs_gen_files, mkdocstrings' 2> /dev/null || $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt $(DOCS)
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python docs/_site/check.py

docs-serve: $(NIGHTLY_SET)  ## Show the documentation at http://127.0.0.1:8001, and again whenever a page changes
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt $(DOCS)
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8001

notebook: $(NIGHTLY_SET)  ## Execute the notebook of examples/
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt nbclient ipykernel
	@$(BIN)/jupyter execute examples/notebooks/first_graph.ipynb

page:  ## Build the page of a run anew from its sources (needs npm)
	@mkdir -p build/page && cp -R choreo_agents/inspection/page/. build/page
	@cd build/page && npm ci --silent --no-audit --no-fund && node build.mjs ../../choreo_agents/inspection/run.html

page-check: page  ## See that the page which is shipped is what its sources make
	@git diff --exit-code --stat choreo_agents/inspection/run.html

torture: $(NIGHTLY_SET)  ## Run random graphs of tenants with faults, cancelled and resumed, and rude clients, for ten minutes (OPTIONS="--seconds 60 --seed 3")
	@PYTHONPATH=tests:integrations/server $(BIN)/python -m torture.everything $(OPTIONS)

side-channel: $(NIGHTLY_SET)  ## See whether the time to a first token tells a tenant what another has encoded (OPTIONS="--pairs 100")
	@PYTHONPATH=tests:integrations/server $(BIN)/python -m torture.side_channel $(OPTIONS)

wheel: $(NIGHTLY_SET)  ## Build the wheel whose kernels run on any Linux on x86-64 into dist/, and check that they do (downloads a compiler once)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@CHOREO_AGENTS_NATIVE=manylinux $(BIN)/python -m hatchling build -t wheel -d dist
	@$(BIN)/auditwheel show dist/choreo_agents-*manylinux*.whl
	@rm -f choreo_agents/native/native.so
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .

install: $(NIGHTLY_SET)  ## Create .venv with the package and all that its development needs

format: $(TEST_SET)  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

train-embedded: $(NIGHTLY_SET)  ## Train the shipped embedded model from scratch (resumes; about 75 minutes on 2 cores)
	@$(BIN)/choreo train embedded --out choreo_agents/models/embedded/weights

clean:  ## Remove the virtual environments and caches
	rm -rf .venv $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(PRODUCT_SET): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "choreo-agents needs Python 3.11 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv: choreo-agents and what it needs, about 1.1 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(call pip,-e .)
	@touch $@

$(TEST_SET): $(PRODUCT_SET)
	@echo "setting up .venv: what tests and checks need"
	@$(call pip,-e '.[test]')
	@touch $@

$(NIGHTLY_SET): $(TEST_SET)
	@echo "setting up .venv: benchmarks, Ray, PostgreSQL, quantisation, telemetry"
	@$(call pip,-e '.[nightly]' -e benchmarks)
	@touch $@

# What is pinned for development is kept, but for what has to be old.
$(LOWEST)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(LOWEST) with $(FLOORS) ..."
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@grep -vE '^(torch|transformers|tokenizers|triton)==' constraints.txt > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		-c $(LOWEST)/constraints.txt $(FLOORS) -e '.[nightly]' -e benchmarks
	@touch $@
