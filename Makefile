# Two commands matter to a newcomer: `make run` and `make test`. Everything runs inside .venv.
PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
# Another torch build than the one pip finds: make run TORCH_INDEX=https://…
TORCH_INDEX ?=
PIP_FLAGS   := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
STAMP       := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast check fmt proto lock exactness bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@echo "Creating the environment in $(VENV) (a few minutes the first time: torch is large) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

run: setup  ## start drafter, verifier and scheduler; print the URL and a curl line
	@$(BIN)/dspark up $(ARGS)

test: setup  ## every test that CI runs
	$(BIN)/pytest

test-fast: setup  ## the tests that need no real model
	$(BIN)/pytest -m 'not slow'

check: setup  ## lint, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

exactness: setup  ## 64 prompts x 128 tokens through all processes: is the output the target's own? (half an hour)
	$(BIN)/dspark evaluate exactness $(ARGS)

bench: setup  ## planners against each other at concurrency 1 and 16
	$(BIN)/dspark bench serve $(ARGS)

proto: setup  ## regenerate the gRPC stubs from proto/
	$(BIN)/python scripts/proto.py

lock:  ## rewrite constraints.txt from what is installed
	$(BIN)/python scripts/lock.py

clean:  ## remove the environment and caches (not the model cache)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
