# Needs Python 3.10 or newer and make; everything else is installed into $(VENV) on first use.
#
#   make test PYTEST_ARGS="tests/unit -k metrics"      PYTHON=python3.12 VENV=.venv312 make lint

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test torture torches strangers lint bench conformance wheels clean

help:
	@echo "make demo         a guided run on a CPU"
	@echo "make test         all tests, two workers"
	@echo "make torture      the hard cases alone, and a table of them (ARGS=\"-m 'slow or not slow'\": also the long ones)"
	@echo "make torches      the same small programs on ten versions of torch (ARGS=2.15.0: on one)"
	@echo "make strangers    programs on libraries that nobody here wrote, in an environment of their own (ARGS=zuko_flow: one)"
	@echo "make lint         ruff check, ruff format --check, mypy"
	@echo "make bench        speed against the peer, both in one run"
	@echo "make conformance  which seed features have a test (ARGS=--missing: only those without)"
	@echo "make wheels       abi3 wheels for Linux on x86-64 and aarch64, made and tried in .wheels"
	@echo "make venv         only install into $(VENV)"
	@echo "make clean        remove everything made here"

venv: $(STAMP)

# torch first, so that the package never decides which torch is installed.
$(STAMP): pyproject.toml setup.py $(wildcard src/ulpscope/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,lint]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(ARGS)

# The whole suite must end in under 10 minutes on two cores. One torch thread per worker: more only fight for the cores.
test: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# The long ones (a million calls, 200 kills) run when asked for: ARGS="-m 'slow or not slow'".
torture: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest tests/torture --torture-table -m "not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Gigabytes for each version, which go again. ARGS="2.1.0 2.15.0" or ARGS="--newest"; .torches is where it works.
torches: $(STAMP)
	$(BIN)/python tests/torches/run.py $(ARGS)

# Some two gigabytes of libraries, kept in .strangers.
strangers: $(STAMP)
	$(BIN)/python tests/strangers/run.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

conformance:
	$(PYTHON) tools/conformance.py $(ARGS)

# Compiled by zig, a download of 100 MB; the aarch64 one runs under qemu-aarch64-static, from Debian's qemu-user-static.
wheels:
	$(PYTHON) tools/wheels.py

clean:
	rm -rf $(VENV) .wheels build dist src/*.egg-info
	find src -name "*.so" -o -name "*.pyd" | xargs rm -f
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
