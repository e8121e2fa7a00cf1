# Each target sets up what it needs in $(VENV), on a fresh machine too, and does it again only when pyproject.toml changes.

VENV ?= .venv
# The first interpreter that is new enough; `make PYTHON=/path/to/python3 test` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test lint
.DELETE_ON_ERROR:

# A demonstration of correctness, on the CPU unless told otherwise: make demo JAX_PLATFORMS=cuda
demo: export JAX_PLATFORMS ?= cpu
demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo

test: export JAX_PLATFORMS := cpu
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no python3 of version 3.11 or newer on PATH; name one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "error: cannot create $(VENV); on Debian: apt-get install python3-venv" >&2; exit 1; }

# Plain install: enough to generate and to train. An environment that already has the test tools keeps them.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[test,dev]'
	touch $(VENV)/.installed $@
