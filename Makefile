PYTHON_IN_VENV := .venv/bin/python
BENCHMARKS := $(filter-out _%,$(notdir $(basename $(wildcard benchmarks/*.py))))
# Ray and PyTorch are in the environment with the oldest Gymnasium: what needs them, and what depends on Gymnasium itself.
RAY_TESTS := tests/ray tests/criu/test_torch.py
OLDEST_TESTS := tests/test_registration.py tests/env tests/vector $(RAY_TESTS)
# These wait for daemons and other kernels more than they compute.
ENGINE_TESTS := tests/backends tests/docker tests/gvisor
# In a home folder of their own: what libraries write there is no part of the user's.
PYTEST := HOME=$$HOME_ASIDE $(PYTHON_IN_VENV) -m pytest -q -p no:cacheprovider

.PHONY: setup demo test test-main test-engines-and-ray test-slow check lint format bench bench-train
.DEFAULT_GOAL := demo

setup:
	@scripts/setup.sh

demo: setup
	@$(PYTHON_IN_VENV) -m sandbox_gym demo

test: setup
	@echo "Two suites run side by side; each shows what came of it when it ends, in ten minutes or so." >&2
	@set -e; HOME_ASIDE=$$(mktemp -d); export HOME_ASIDE; trap 'rm -rf "$$HOME_ASIDE"' EXIT; \
	$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-main test-engines-and-ray

test-main:
	$(PYTEST) -m "not slow" $(addprefix --ignore=,$(RAY_TESTS) $(ENGINE_TESTS))

test-engines-and-ray:
	$(PYTEST) -m "not slow" $(ENGINE_TESTS)
	HOME=$$HOME_ASIDE .venv-oldest/bin/python -m pytest -q -p no:cacheprovider -m "not slow" $(OLDEST_TESTS)

# What `make test` leaves out; none of it needs Ray.
test-slow: setup
	@set -e; HOME_ASIDE=$$(mktemp -d); export HOME_ASIDE; trap 'rm -rf "$$HOME_ASIDE"' EXIT; set -x; \
	$(PYTEST) -m slow $(addprefix --ignore=,$(RAY_TESTS))

lint: setup
	$(PYTHON_IN_VENV) -m ruff format --check
	$(PYTHON_IN_VENV) -m ruff check
	$(PYTHON_IN_VENV) -m mypy

check: lint test

format: setup
	$(PYTHON_IN_VENV) -m ruff check --fix-only
	$(PYTHON_IN_VENV) -m ruff format

bench: setup
	@failed=; for name in $(BENCHMARKS); do \
	  venv=.venv; [ $$name != ray ] || venv=.venv-oldest; \
	  echo "== $$name"; $$venv/bin/python -m benchmarks.$$name --quick || failed="$$failed $$name"; \
	done; [ -z "$$failed" ] || { echo "missed a bar:$$failed"; exit 1; }

# Half an hour: PPO to a return of 450, and AlphaZero from scratch.
bench-train: setup
	.venv-oldest/bin/python -m benchmarks.ray
