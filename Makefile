# `make test` on a fresh clone needs make and a Python of at least 3.12, which tools/python_for finds
# (PYTHON=... names one); it builds a venv of its own.

PYTHON ?=
VENV ?= .venv
# Further requirements of the venv, as `jax==0.11.2`.
REQUIREMENTS ?=
TESTS ?= tests
WORKERS ?= 2

# What `make test-oldest` runs, on the oldest JAX that is supported: the tests of the files that touch
# JAX's inner parts, or its version (tests/test_package.py has which).
OLDEST_TESTS = $(addprefix tests/, test_package.py test_known_jax_bugs.py \
	checkpoint/test_several_processes.py engine/test_starting.py jaxpr/test_evaluate.py jaxpr/test_primitives.py \
	jaxpr/test_sample_independence.py jaxpr/test_traverse.py launch/test_environment.py \
	moe/test_grouped_products.py traced_loss/test_autocast.py ops/test_attention_call.py ops/test_gpu_attention.py \
	ops/test_token_order.py planner/test_memory_layout.py \
	planner/test_on_platform.py planner/test_torus.py run/test_watchdog.py train/test_staged_init.py )
OLDEST_VENV ?= .venv-oldest
OLDEST_JAX = jax==0.11.2 jaxlib==0.11.2

# What tests compare with: tests/references/requirements.txt, on Python 3.11, in a process of its own.
# JAXSPEED_REFERENCES=/path/to/python names another interpreter that has it.
REFERENCES = .venv-references

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
# A worker that dies is replaced once, and its test is run again: see tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 1 \
	--dist loadfile --no-loadscope-reorder
# Which test executes which file, as `make test-map` recorded it.
TEST_MAP = .cache/test_map
DEFAULT = not full and not sampled
FAST_TESTS = $(shell grep --recursive --files-with-matches --include 'test_*.py' 'pytestmark = pytest.mark.fast' $(TESTS))

.DEFAULT_GOAL := help
.PHONY: help install train test test-fast test-for test-map test-sample test-full test-record test-oldest install-oldest references lint format types docs wheel bench clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do \
		printf '  make %-12s %s\n' "$$name" "$$what"; done

install: $(INSTALLED)  ## a venv with jaxspeed (editable) and what its tests need

# An interpreter that is too old, or that is gone, has left a venv that is of no use.
$(INSTALLED): pyproject.toml
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
		python='$(PYTHON)'; [ -n "$$python" ] || python=$$(tools/python_for) || exit 1; \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) and "jaxspeed needs Python 3.12 or newer; this is " + sys.version.split()[0])' && \
		"$$python" -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --editable '.[test,tpu]' $(REQUIREMENTS)
	@touch $@

train: $(INSTALLED)  ## train a small model on 8 simulated devices: about three minutes
	$(BIN)/jaxspeed train configs/tiny.yaml

test: $(INSTALLED)  ## each claim of the tests once, within budgets
	$(PYTEST) -m '$(DEFAULT)' $(TESTS)

test-sample: $(INSTALLED)  ## one of the parts of the sampled tests, by the sources or by SEED=number
	@mkdir -p .cache
	@$(BIN)/python -m tests.support.sample $(if $(SEED),--seed $(SEED)) > .cache/sample
	$(PYTEST) @.cache/sample

test-fast: $(INSTALLED)  ## the tests that compile nothing: within a minute
	$(PYTEST) -m 'fast and $(DEFAULT)' $(FAST_TESTS)

test-for: $(INSTALLED)  ## the tests that execute one file: make test-for F=jaxspeed/optim/clipping.py
	@mkdir -p $(dir $(TEST_MAP))
	@$(BIN)/python -m tools.test_map '$(F)' $(TEST_MAP) > $(TEST_MAP).chosen
	$(PYTEST) -m '$(DEFAULT)' @$(TEST_MAP).chosen

test-map: $(INSTALLED)  ## record which test executes which file, for test-for (slower than `make test`)
	mkdir -p $(dir $(TEST_MAP))
	rm -f $(TEST_MAP) $(TEST_MAP).*
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(CURDIR)/$(TEST_MAP) $(PYTEST) -m '$(DEFAULT)' $(TESTS)
	$(BIN)/coverage combine --data-file=$(TEST_MAP)

test-full: $(INSTALLED)  ## every combination that is promised (long)
	$(PYTEST) -m 'full or not full' $(TESTS)

test-record: $(INSTALLED)  ## run the sampled tests of TESTS, and record their time
	@mkdir -p .cache
	$(PYTEST) -m 'sampled and not full' --cpu-seconds .cache/cpu_seconds $(TESTS)
	$(BIN)/python -m tests.support.cpu_seconds .cache/cpu_seconds

install-oldest:
	$(MAKE) install VENV=$(OLDEST_VENV) REQUIREMENTS='$(OLDEST_JAX)'

test-oldest:  ## what depends on JAX's inner parts, on the oldest JAX that is supported
	@echo "the tests on $(OLDEST_JAX), these only: $(OLDEST_TESTS)"
	$(MAKE) test VENV=$(OLDEST_VENV) REQUIREMENTS='$(OLDEST_JAX)' TESTS='$(OLDEST_TESTS)'

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

docs: $(INSTALLED)  ## the pages and the API reference as HTML, in docs/_build
	$(BIN)/python -m sphinx -q -W docs docs/_build
	@echo "docs/_build/index.html"

wheel: $(INSTALLED)  ## an sdist and a wheel in dist/, checked and tried in a venv without the checkout
	rm -rf dist build
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir dist dist/*.tar.gz
	$(BIN)/python -m twine check --strict dist/*
	tools/try_wheel dist/*.whl $(BIN)/python

bench: $(INSTALLED)  ## every benchmark, each in a process of its own
	set -e; for file in $(filter-out benchmarks/reference_%,$(wildcard benchmarks/*.py)); do $(BIN)/python $$file; done

clean:  ## everything that was made
	rm -rf $(VENV) $(OLDEST_VENV) $(REFERENCES) runs .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
