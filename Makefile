# make quickstart: install, then the main job.  make test: install, then the tests.  Neither installs twice.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: setup quickstart test check format

setup: $(STAMP)

# torch comes first and alone: without an NVIDIA GPU the exact version keeps pip from fetching CUDA. The last step
# migrates empty databases of Prefect and MLflow once, which every new workspace then copies.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@if nvidia-smi -L >/dev/null 2>&1; then torch='torch>=2.13,<2.15'; else torch='torch==2.13.0'; fi; \
	echo "$(PIP) $$torch"; $(PIP) "$$torch"
	$(PIP) --editable '.[dev]'
	$(BIN)/python -m flows.templates
	@touch $@

quickstart: $(STAMP)
	$(BIN)/nonet run recipes/quickstart.toml

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
