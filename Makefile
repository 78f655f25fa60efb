# make demo    train and evaluate an agent        make test    the whole suite
# Both create .venv. `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
DEMO   ?= demo
BIN    := $(VENV)/bin
NEED   := PYTHON="$(PYTHON)" .ci/need
TEMPLATES := .cache/templates/.fetched
# Python compiles what is imported: all of torch takes half a minute, of which the first step needs a tenth. Not where
# the environment forbids to keep bytecode: there every command would compile again.
LAZY   := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
PIP    := $(BIN)/python -m pip install --disable-pip-version-check $(LAZY) -c constraints.txt
# Two more than the cores: many tests wait for a process or a clock.
SOME   := -m "not ray and not classes"
JOBS   ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1) + 2 )))
AGENTRL := $(BIN)/agentrl

.DEFAULT_GOAL := help
.PHONY: help demo test test-core test-classes test-ray attacks lint types check docs screens clean need need-sandbox

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: need-sandbox $(VENV)/.base  ## learn a tool in minutes: init, train, evaluate base against trained
	@$(AGENTRL) demo $(DEMO) $(if $(WEAK),--yes)
	@echo "In this shell first: source '$(abspath $(BIN))/activate'"

# Bytecode is kept even where a container's environment forbids it: a hundred processes of the suite import the package.
test: $(VENV)/.dev $(TEMPLATES)  ## the whole suite, offline once installed
	@$(NEED) bubblewrap || echo "The strong sandbox is not tested." >&2
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(SOME) $(ARGS)

test-core: $(VENV)/.dev $(TEMPLATES)  ## the core's suite in a copy without any plugin
	rm -rf .cache/core && $(BIN)/python -m tests.helpers.core .cache/core -q -n $(JOBS) --dist worksteal $(SOME) $(ARGS)

test-classes: $(VENV)/.dev  ## every decoder class of transformers: sampled, trained, compared
	$(BIN)/python -m pytest -q -n $(JOBS) -m classes $(ARGS) tests/inference/test_architectures.py

test-ray: $(VENV)/.dev  ## workers on a Ray cluster of three nodes; installs Ray (80 MB)
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(PIP) -e '.[ray]' || echo "Ray cannot be installed here." >&2
	$(BIN)/python -m pytest -q -m ray $(ARGS) tests/plugins/ray

LEVEL  ?= ns
attacks: $(VENV)/.dev  ## all hostile programs against the sandbox; LEVEL=docker, landlock
	$(BIN)/python -m tests.sandbox.attacks $(LEVEL)

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo "Run: $(BIN)/ruff format ." >&2; exit 1; }

types: $(VENV)/.dev  ## mypy --strict
	$(BIN)/mypy

check: lint types test test-classes test-ray  ## everything that .ci/run checks

docs: $(VENV)/.docs  ## the documentation in site/, with its generated pages
	$(BIN)/python docs/make_cli.py && $(BIN)/python docs/make_config.py && $(BIN)/python docs/make_store.py && $(BIN)/python docs/make_algorithms.py
	PYTHONPATH=. $(BIN)/python docs/make_architecture.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

screens: $(VENV)/.dev  ## the pictures of the screens in docs/screens
	PYTHONPATH=. $(BIN)/python docs/make_screens.py

clean:  ## remove .venv, the demo, caches and builds (runs/ stays)
	rm -rf $(VENV) $(DEMO) .cache site dist build .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

need:
	@$(NEED) python3 python3-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; choose one with make PYTHON=python3.12 …" >&2; exit 1; }

# Without bubblewrap the demo continues at a level that needs no package, if `agentrl init` finds it strong enough.
need-sandbox: need
	@$(NEED) bubblewrap || true

# Chat templates of other projects, for tests that skip without them: fetched once, retried after a failure.
$(TEMPLATES): tests/helpers/template.py | $(VENV)/.dev
	@$(BIN)/python -m tests.helpers.template && touch $@ || true

$(VENV)/bin/python: | need
	@echo "Installing into $(VENV): about a minute, torch is large."
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.base
