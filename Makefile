# A bare machine needs python3.11 or newer with pip, and network once; every target below installs what it lacks.
PYTHON ?= python3

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES  := hardware_profiles costmodels planner runtime

# What builds the documentation site has an environment of its own: tests do without it.
DOCS_VENV := .venv-docs
DOCS      := $(DOCS_VENV)/.installed
EXTRA     := import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])

# Parsers of training engines, without what they depend on: a folder of packages, and the sources of Megatron-LM, whose
# arguments are in no wheel. What cannot be had is left out, and its tests are skipped.
ENGINES   := .engines
MEGATRON  ?= https://github.com/NVIDIA/Megatron-LM

# Tests run in so many processes, each with one thread, whole files to each; 0 is this one. Files keep their order, in
# which the long ones come early: pytest-xdist would put those with few tests last, however long these take. Compiled
# tests are kept, also where Python is told not to: pytest takes ten seconds to rewrite their assertions.
WORKERS ?= 2
PYTEST  := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test thorough exhaustive engines check format bench docs pictures notebooks clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(INSTALLED)  ## plan Llama 70B for 64 devices; plan a tiny Llama for 4 local processes and run it
	@mkdir -p build
	$(BIN)/plan --model llama70b --devices 64 -o build/llama70b-64.json
	$(BIN)/plan --model llama-tiny --devices 4 --hardware cpu -o build/tiny.json
	$(BIN)/plan run build/tiny.json --steps 5

# The checks run beside the tests, which wait for each other at times; what they say comes behind, where they fail.
test: $(INSTALLED)  ## the checks, and all tests but the long lists
	@checks=$$(mktemp); $(MAKE) --no-print-directory check >"$$checks" 2>&1 & pid=$$!; \
	$(PYTEST); failed=$$?; \
	wait $$pid || { cat "$$checks"; failed=1; }; rm -f "$$checks"; exit $$failed

thorough: $(INSTALLED)  ## the long lists of cases, CI's second step
	$(PYTEST) -m "thorough and not exhaustive"

exhaustive: $(INSTALLED)  ## lists that are longer still, before a release
	$(PYTEST) -m exhaustive

engines: $(INSTALLED)  ## hold exports against the parsers of the engines themselves, as far as they can be had
	@for package in $$($(PYTHON) -c '$(EXTRA)' engines); do \
	    DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade --target $(ENGINES)/packages "$$package" \
	        || echo "notice: no $$package; what needs it is skipped"; \
	done
	@for package in $$($(PYTHON) -c '$(EXTRA)' engines-later); do \
	    $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(ENGINES)/later "$$package" \
	        || echo "notice: no $$package; what needs it is skipped"; \
	done
	@test -d $(ENGINES)/megatron || git clone --quiet --depth 1 $(MEGATRON) $(ENGINES)/megatron \
	    || echo "notice: no sources of Megatron-LM; what needs them is skipped"
	PYTHONPATH=$(ENGINES)/packages MEGATRON_LM=$(CURDIR)/$(ENGINES)/megatron TORCHTITAN_LATER=$(CURDIR)/$(ENGINES)/later OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines -rs

check: $(INSTALLED)  ## formatting, lint and types, without the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict

format: $(INSTALLED)  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## run every benchmark; one of them: make bench ONLY=main_job; less: EXTENT=quick; all: EXTENT=full
	$(BIN)/python tests/benchmarks/run.py $(if $(ONLY),--only $(ONLY)) $(if $(EXTENT),--extent $(EXTENT))

docs: $(INSTALLED) $(DOCS)  ## build the documentation site into build/docs, strictly
	$(BIN)/python docs/site/build.py --mkdocs $(DOCS_VENV)/bin/mkdocs

pictures: $(INSTALLED)  ## make the pictures in docs/ anew; needs Chromium; some of them: make pictures ONLY=ui
	$(BIN)/python docs/pictures.py $(ONLY)

notebooks: $(INSTALLED)  ## run the notebooks and write their outputs anew; some of them: make notebooks ONLY=compare
	$(BIN)/python notebooks/execute.py $(ONLY)

clean:  ## remove what was built, caches too; the environment stays
	rm -rf build dist *.egg-info $(ENGINES) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The stamp makes a second run quick; a changed pyproject.toml installs again, which fetches only what is missing. Our
# modules are compiled here: where PYTHONDONTWRITEBYTECODE is set, as in many images, each command would compile them.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m compileall -q $(PACKAGES)
	@touch $@

$(DOCS): pyproject.toml
	test -x $(DOCS_VENV)/bin/pip || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet $$($(PYTHON) -c '$(EXTRA)' docs)
	@touch $@
