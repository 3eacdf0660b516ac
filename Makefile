# make demo: train a small GPT on two workers.   make test: the tests, without the exhaustive ones.
# make test-all: all of them.   More: lint, bench, clean.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
export PYTHONUNBUFFERED := 1

.PHONY: demo test test-all lint bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --no-input --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[test]"
	touch $@

# Two workers; one where there is exactly one GPU. Without a GPU they are CPU workers.
demo: $(INSTALLED)
	@workers=$$($(PY) -c 'import os; from zlaunch.launch.devices import discover; \
	  print(1 if len(discover(os.environ).tokens) == 1 else 2)'); \
	run="$(VENV)/bin/zlaunch --num_gpus $$workers examples/train_gpt.py"; \
	echo "$$run --config examples/ds_stage2.json --save out"; \
	$$run --config examples/ds_stage2.json --save out; \
	echo; echo "Saved out/pytorch_model.bin. Plain torch loads it and writes:"; echo; \
	$(PY) examples/sample.py out/pytorch_model.bin; \
	echo; echo "Now with the parameters sharded too (ZeRO stage 3):"; \
	echo "  $$run --config examples/ds_stage3.json"

# FLAGS: more options for pytest.
test: $(INSTALLED)
	$(PY) -m pytest -n 2 -m "not exhaustive" $(FLAGS)

test-all: $(INSTALLED)
	$(PY) -m pytest -n 2 $(FLAGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) -m benchmarks.train --peers

clean:
	rm -rf $(VENV) build dist out runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
