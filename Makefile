# `make test` on a fresh clone needs python3 (3.11 or newer) and make; it builds a venv of its own.

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
WORKERS ?= 2

# What `make test-newest` runs: what touches jax's and flax's inner parts, as far as it is quick.
# The whole suite twice would not fit the time that CI has.
NEWEST_TESTS = $(addprefix tests/,models jaxpr objective hlo ops zero3 tensor_parallel pipeline) \
	$(patsubst %,tests/engine/test_%.py,offload_check pipeline_engine starting tensor_sharding) \
	$(patsubst %,tests/train/test_%.py,parity_awkward parity_kinds parity_pipeline parity_ring) \
	$(patsubst %,tests/train/test_%.py,complex_parameters draws frozen_normalisation written_by_the_loss) \
	tests/checkpoint/test_restore*.py
NEWEST_VENV ?= .venv-newest
NEWEST_PYTHON ?= python3.12

# What tests compare with: tests/references/requirements.txt, on Python 3.11, in a process of its own.
# JAXSPEED_REFERENCES=/path/to/python names another interpreter that has it.
REFERENCES = .venv-references

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
# A worker that dies ends the run: xdist would run its test again, and wait forever if that dies.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0 \
	--dist loadfile --no-loadscope-reorder
# Which test executes which file, as `make test-map` recorded it.
TEST_MAP = .cache/test_map
FAST_TESTS = $(shell grep --recursive --files-with-matches --include 'test_*.py' 'pytestmark = pytest.mark.fast' $(TESTS))

.DEFAULT_GOAL := help
.PHONY: help install train test test-fast test-for test-map test-full test-newest references lint format types bench clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do \
		printf '  make %-12s %s\n' "$$name" "$$what"; done

install: $(INSTALLED)  ## a venv with jaxspeed (editable) and what its tests need

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxspeed needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,tpu]'
	touch $@

train: $(INSTALLED)  ## train a small model on 8 simulated devices: about two minutes
	$(BIN)/jaxspeed train configs/tiny.yaml

test: $(INSTALLED)  ## the tests, in their covering sets
	$(PYTEST) -m 'not full' $(TESTS)

test-fast: $(INSTALLED)  ## the tests that compile nothing: within a minute
	$(PYTEST) -m 'fast and not full' $(FAST_TESTS)

test-for: $(INSTALLED)  ## the tests that execute one file: make test-for F=jaxspeed/optim/clipping.py
	@mkdir -p $(dir $(TEST_MAP))
	@$(BIN)/python -m tools.test_map '$(F)' $(TEST_MAP) > $(TEST_MAP).chosen
	$(PYTEST) -m 'not full' @$(TEST_MAP).chosen

test-map: $(INSTALLED)  ## record which test executes which file, for test-for (slower than `make test`)
	mkdir -p $(dir $(TEST_MAP))
	rm -f $(TEST_MAP) $(TEST_MAP).*
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(CURDIR)/$(TEST_MAP) $(PYTEST) -m 'not full' $(TESTS)
	$(BIN)/coverage combine --data-file=$(TEST_MAP)

test-full: $(INSTALLED)  ## every combination that is promised (long)
	$(PYTEST) -m 'full or not full' $(TESTS)

test-newest:  ## what depends on jax's inner parts, on NEWEST_PYTHON and the newest jax
	@echo "the tests on $(NEWEST_PYTHON), these only: $(NEWEST_TESTS)"
	$(MAKE) test PYTHON=$(NEWEST_PYTHON) VENV=$(NEWEST_VENV) TESTS='$(wildcard $(NEWEST_TESTS))'

references: $(REFERENCES)/.installed  ## a venv with torch, transformers, DeepSpeed, ..., with which tests compare

$(REFERENCES)/.installed: tests/references/requirements.txt
	@tests/references/make_venv.sh $(REFERENCES)

lint: $(INSTALLED)  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(INSTALLED)  ## format and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(INSTALLED)  ## the type checker
	$(BIN)/mypy

bench: $(INSTALLED)  ## every benchmark, each in a process of its own
	set -e; for file in $(filter-out benchmarks/reference_%,$(wildcard benchmarks/*.py)); do $(BIN)/python $$file; done

clean:  ## everything that was made
	rm -rf $(VENV) $(NEWEST_VENV) $(REFERENCES) runs .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
