# make demo: train a small GPT on two workers.   make test: run the tests, except exhaustive ones.
# make test-fast: run most unit tests (40 s at most).
# make test-all: run all tests, and the runtime tests on other versions of Python and torch (test-support).
# make test-quarter: run a quarter of the exhaustive tests, as CI does.   make mutate: run mutation tests.
# make numerics: compare results with plain torch and write docs/numerics.md (about an hour).
# make docs: build the documentation site in site/.   More: lint, bench, clean.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
WITH_TOOLS := $(VENV)/.installed-with-tools
WITH_DOCS := $(VENV)/.installed-with-docs
# Python compiles what it imports, which is a small part of torch; pip would compile all, for a minute.
PIP := $(PY) -m pip install --no-input --no-compile --disable-pip-version-check --progress-bar off -c constraints.txt
# torch's CPU build is a tenth of the size of the CUDA build. TORCH_INDEX= installs from your default index.
TORCH_INDEX ?= $(if $(wildcard /proc/driver/nvidia/gpus/*),,https://download.pytorch.org/whl/cpu)
export PYTHONUNBUFFERED := 1
# Test workers: one per core, from 2 to 4. Ranks wait actively, so more would use up each other's time, but for
# the worker of the tests that wait (tests/conftest.py), which the targets of CI start besides.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))

.PHONY: demo install test test-fast test-all test-every test-quarter test-support test-smoke mutate numerics lint docs bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  $(PIP) --no-deps --retries 1 --timeout 15 --index-url $(TORCH_INDEX) torch || \
	  echo "$(TORCH_INDEX) has no matching torch: using the default index"; fi
	$(PIP) -e .
	touch $@

# Add the packages of the tests and linters. Collecting the tests compiles what they import; otherwise each of
# their processes would, all at the same time. Errors do not matter here, since the tests show them.
$(WITH_TOOLS): $(INSTALLED)
	$(PIP) -e ".[test]"
	$(PY) -m pytest --collect-only -qq >/dev/null 2>&1 || true
	touch $@

# Add the packages of the documentation site.
$(WITH_DOCS): $(INSTALLED)
	$(PIP) -e ".[docs]"
	touch $@

# Two workers, or one on a machine with one GPU. Without a GPU, CPU workers.
demo: $(INSTALLED)
	@workers=$$($(PY) -c 'import os; from zlaunch.system.machine import discover; \
	  print(1 if len(discover(os.environ).tokens) == 1 else 2)'); \
	run="$(VENV)/bin/zlaunch --num_gpus $$workers examples/train_gpt.py"; \
	echo "$$run --config examples/ds_stage2.json --save out"; \
	$$run --config examples/ds_stage2.json --save out; \
	echo; echo "Saved out/pytorch_model.bin. Plain torch loads it and generates text:"; echo; \
	$(PY) examples/sample.py out/pytorch_model.bin; \
	echo; echo "Next, shard the parameters too (ZeRO stage 3):"; \
	echo "  $$run --config examples/ds_stage3.json"

# Everything that the other targets need.
install: $(WITH_TOOLS) $(WITH_DOCS)

# FLAGS: more options for pytest. tests/budget.py sets the budget of CPU seconds.
test: $(WITH_TOOLS)
	$(PY) -m pytest -n $$(($(WORKERS) + 1)) -m "not exhaustive" --cpu-file=$(VENV)/cpu-test.json --budget $(FLAGS)

# tests/unit, except kernels and their twins, tests of the project's own files, the benchmark rehearsal, tests that
# fuzz, wait or start processes, and those whose imports take a second: they would double the time.
SLOW := $(addprefix --ignore=tests/unit/,project benchmarks network data kubernetes step_time \
  cli/test_estimate.py cli/test_init.py cli/test_rerun.py config/test_fuzz.py config/test_keys_are_read.py \
  monitor/test_monitor.py supervisor/test_git_state.py supervisor/test_redact.py \
  supervisor/test_signal_wakeup.py view/test_screen.py \
  cuda_ops/test_quantize.py cuda_ops/test_narrow_step.py cuda_ops/test_signs.py) --ignore-glob=*/test_kernels_*
test-fast: $(WITH_TOOLS)
	$(PY) -m pytest -n $(WORKERS) -m "not exhaustive" $(SLOW) tests/unit $(FLAGS)

# -k: run test-support even if test-every fails.
test-all:
	$(MAKE) -k test-every test-support

test-every: $(WITH_TOOLS)
	$(PY) -m pytest -n $(WORKERS) --cpu-file=$(VENV)/cpu-test-all.json $(FLAGS)

# The number of commits selects the quarter: tests/selection.py.
test-quarter: $(WITH_TOOLS)
	$(PY) -m pytest -n $$(($(WORKERS) + 1)) --quarter --cpu-file=$(VENV)/cpu-test-quarter.json $(FLAGS)

# Needs Python 3.10 and 3.12 on PATH or in pyenv's folder. Installs into .venv-support.
test-support:
	$(PYTHON) -m tests.support --keep-going --torch-index "$(TORCH_INDEX)" $(SUPPORT)

# The same versions, with a few tests of every package that calls torch.
test-smoke:
	$(PYTHON) -m tests.support --smoke --keep-going --torch-index "$(TORCH_INDEX)" $(SUPPORT)

# Put defects into copies of the source, one at a time, and run the closest tests.
mutate: $(WITH_TOOLS)
	$(PY) -m tests.mutations $(FLAGS)

# Train 75 tiny Hugging Face models in each precision, at each stage, built each way. FLAGS="--families llama" selects
# a part; to run without --write, call the module. An interrupted run resumes.
numerics: $(WITH_TOOLS)
	$(PY) -m tests.numerics --keep $(VENV)/numerics.jsonl --write docs/numerics.md $(FLAGS)

# Mutations quote lines of the source: after an edit, their test says which of them to change.
lint: $(WITH_TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/unit/project/test_mutations.py

# Warnings, such as broken links, are errors. To use the search: python3 -m http.server -d site
docs: $(WITH_DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(WITH_TOOLS)
	$(PY) -m benchmarks.train --peers

clean:
	rm -rf $(VENV) .venv-support build dist out runs site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
