# `make demo` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test lint format bench performance results fuzz test-faults docs pictures clean

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
	@[ -n "$$(which chromium chromium-browser google-chrome)" ] || \
		echo 'Chromium is not installed: the tests of the report page in a browser are skipped.'
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term --cov-fail-under=90
	! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		SAB_TEST_GPU=1 $(BIN)/python -m pytest -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/sab bench

# The tables and figures of docs/performance.md, from the records that are kept.
performance: $(READY)
	$(BIN)/python -m tools.performance

# The tables and figures of docs/results.md and the README, from the records that are kept.
results: $(READY)
	$(BIN)/python -m tools.results

# Every file that is read, damaged in 50,000 ways, and 5,000 command lines; what came of it goes to tests/faults/fuzz.jsonl.
fuzz: $(READY)
	$(BIN)/python -m tools.fuzz

test-faults: fuzz

# Runs that are killed, interrupted, damaged and hindered for real.
test-faults: $(READY)
	$(BIN)/python -m pytest -m slow tests/faults

# The documentation as a site, in site/.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The two pictures of docs/method.md, from the demonstration's run.
pictures: demo
	$(BIN)/python -m tools.pictures demo/sab

clean:
	rm -rf .venv demo runs dist site .pytest_cache .ruff_cache .hypothesis .coverage
