# Everything runs from a fresh clone: each target makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: chat test soak bench lint setup clean

chat: $(STAMP)
	@$(BIN)/perdure chat

test: lint
	$(BIN)/python -m pytest -m "not soak" -n $(WORKERS) --dist worksteal

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak

bench: $(STAMP)
	$(BIN)/python -m bench

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "perdure needs Python 3.11 or newer; set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing. The first time on a machine compiles llama.cpp, which takes about 10 minutes on 2 cores."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on -e ".[dev,server,bench]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
