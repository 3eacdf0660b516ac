# make demo: train a small GPT on two workers.   make test: the tests, without the exhaustive ones.
# make test-fast: the unit tests, in half a minute.
# make test-all: all of them, and the runtime's with other versions of Python and torch (test-support).
# make test-quarter: a quarter of the exhaustive ones, as CI does.   make mutate: do tests notice defects?
# make numerics: the table of numbers beside plain torch's, docs/numerics.md (about an hour).
# make docs: the documentation as a site, in site/.   More: lint, bench, clean.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
WITH_TOOLS := $(VENV)/.installed-with-tools
WITH_DOCS := $(VENV)/.installed-with-docs
PIP := $(PY) -m pip install --no-input --disable-pip-version-check --progress-bar off -c constraints.txt
# torch's CPU build has a tenth of the size of the one for CUDA. TORCH_INDEX= takes what your index has.
TORCH_INDEX ?= $(if $(wildcard /proc/driver/nvidia/gpus/*),,https://download.pytorch.org/whl/cpu)
export PYTHONUNBUFFERED := 1
# Tests beside each other: one a core, from 2 to 4. One more than cores took as long, and 15% more CPU time.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))

.PHONY: demo install test test-fast test-all test-every test-quarter test-support test-smoke mutate numerics lint docs bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  $(PIP) --no-deps --retries 1 --timeout 15 --index-url $(TORCH_INDEX) torch || \
	  echo "$(TORCH_INDEX) has no torch for us: taking the usual one"; fi
	$(PIP) -e .
	touch $@

# What the tests and the linters need besides.
$(WITH_TOOLS): $(INSTALLED)
	$(PIP) -e ".[test]"
	touch $@

# What the site is made with.
$(WITH_DOCS): $(INSTALLED)
	$(PIP) -e ".[docs]"
	touch $@

# Two workers; one where there is exactly one GPU. Without a GPU they are CPU workers.
demo: $(INSTALLED)
	@workers=$$($(PY) -c 'import os; from zlaunch.system.devices import discover; \
	  print(1 if len(discover(os.environ).tokens) == 1 else 2)'); \
	run="$(VENV)/bin/zlaunch --num_gpus $$workers examples/train_gpt.py"; \
	echo "$$run --config examples/ds_stage2.json --save out"; \
	$$run --config examples/ds_stage2.json --save out; \
	echo; echo "Saved out/pytorch_model.bin. Plain torch loads it and writes:"; echo; \
	$(PY) examples/sample.py out/pytorch_model.bin; \
	echo; echo "To go on, with the parameters sharded too (ZeRO stage 3):"; \
	echo "  $$run --config examples/ds_stage3.json"

# All that the other targets need.
install: $(WITH_TOOLS) $(WITH_DOCS)

# FLAGS: more options for pytest. The budget of CPU seconds is that of tests/budget.py.
test: $(WITH_TOOLS)
	$(PY) -m pytest -n $(WORKERS) -m "not exhaustive" --cpu-file=$(VENV)/cpu-test.json --budget $(FLAGS)

# tests/unit, without kernels and their twins, wheels and the rehearsal of the benchmark: these compile or start
# processes, and take as long again.
SLOW := $(addprefix --ignore=tests/unit/,project/test_packaging.py project/test_core_alone.py \
  project/test_selection.py project/test_hidden_gpus.py cli/test_estimate.py benchmarks \
  cuda_ops/test_quantize.py cuda_ops/test_narrow_step.py cuda_ops/test_signs.py) --ignore-glob=*/test_kernels_*
test-fast: $(WITH_TOOLS)
	$(PY) -m pytest -n $(WORKERS) -m "not exhaustive" $(SLOW) tests/unit $(FLAGS)

# The second also where the first has failed.
test-all:
	$(MAKE) -k test-every test-support

test-every: $(WITH_TOOLS)
	$(PY) -m pytest -n $(WORKERS) --cpu-file=$(VENV)/cpu-test-all.json $(FLAGS)

# Which quarter follows from the number of commits: tests/selection.py.
test-quarter: $(WITH_TOOLS)
	$(PY) -m pytest -n $(WORKERS) --quarter --cpu-file=$(VENV)/cpu-test-quarter.json $(FLAGS)

# Needs Python 3.10 and 3.12, on PATH or in pyenv's folder; keeps its installations in .venv-support.
test-support:
	$(PYTHON) -m tests.support --keep-going --torch-index "$(TORCH_INDEX)" $(SUPPORT)

# The same versions, with few tests of every room that calls torch.
test-smoke:
	$(PYTHON) -m tests.support --smoke --keep-going --torch-index "$(TORCH_INDEX)" $(SUPPORT)

# Puts defects into copies of the source, one at a time, and runs the tests nearest to each.
mutate: $(WITH_TOOLS)
	$(PY) -m tests.mutations $(FLAGS)

# Trains 75 tiny Hugging Face models in each precision, at each stage, built each way. FLAGS="--families llama" takes a
# part; leave --write out by calling the module. An interrupted run resumes.
numerics: $(WITH_TOOLS)
	$(PY) -m tests.numerics --keep $(VENV)/numerics.jsonl --write docs/numerics.md $(FLAGS)

lint: $(WITH_TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Warnings, such as links that lead nowhere, are errors. For the search: python3 -m http.server -d site
docs: $(WITH_DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(WITH_TOOLS)
	$(PY) -m benchmarks.train --peers

clean:
	rm -rf $(VENV) .venv-support build dist out runs site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
