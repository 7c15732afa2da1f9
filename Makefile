# `make demo` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test lint format bench clean

setup: $(READY)

# torch comes first, pinned exactly, as the package index has it for this machine: with CUDA where it offers that.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/sab demo --out demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term --cov-fail-under=90

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/sab bench

clean:
	rm -rf .venv demo runs dist .pytest_cache .ruff_cache .hypothesis .coverage
