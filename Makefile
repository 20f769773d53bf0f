PYTHON_IN_VENV := .venv/bin/python
BENCHMARKS := $(filter-out _%,$(notdir $(basename $(wildcard benchmarks/*.py))))
# Ray and PyTorch are in the environment with the oldest Gymnasium: what needs them, and what depends on Gymnasium itself.
RAY_TESTS := tests/ray tests/criu/test_torch.py
OLDEST_TESTS := tests/test_registration.py tests/env tests/vector $(RAY_TESTS)

.PHONY: setup demo test check lint format bench bench-train
.DEFAULT_GOAL := demo

setup:
	@scripts/setup.sh

demo: setup
	@$(PYTHON_IN_VENV) -m sandbox_gym demo

# In a home folder of their own: what libraries write there is no part of the user's.
test: setup
	@set -e; HOME=$$(mktemp -d); export HOME; trap 'rm -rf "$$HOME"' EXIT; set -x; \
	$(PYTHON_IN_VENV) -m pytest -q $(addprefix --ignore=,$(RAY_TESTS)); \
	.venv-oldest/bin/python -m pytest -q -p no:cacheprovider $(OLDEST_TESTS)

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
