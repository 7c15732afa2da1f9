# `make demo` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
CONSTRAINTS ?= constraints.txt

.PHONY: setup demo test test-arithmetic lint format bench options performance results fuzz test-faults docs pictures clean

setup: $(READY)

# torch comes first, pinned exactly, as the package index has it for this machine: with CUDA where it offers that.
# `make setup CONSTRAINTS=other.txt` installs other versions.
$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' $(CONSTRAINTS))
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/sab demo --out demo

test: $(READY)
	@[ -n "$$(which chromium chromium-browser google-chrome)" ] || \
		echo 'Chromium is not installed: the tests of the report page in a browser are skipped.'
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term --cov-fail-under=90
	! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		SAB_TEST_GPU=1 $(BIN)/python -m pytest -m gpu

# The tests of numbers a second time in another arithmetic and in another order: older instruction sets for PyTorch, MKL
# and oneDNN, and the CPU backend compiled for plain x86-64. Triton's interpreter, which is slow, computes with numpy.
ARITHMETIC := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2
ifeq ($(shell uname -m),x86_64)
ARITHMETIC += SAB_CPU_ARCH=x86-64
endif
NUMERIC := $(filter-out tests/ops/test_triton_%,$(wildcard tests/ops/test_*.py)) tests/parts $(wildcard tests/test_layers*.py) \
	tests/test_cells.py tests/test_hidden.py tests/test_state.py tests/test_tracing.py tests/lab/test_models.py tests/lab/test_claim.py tests/lab/tasks tests/lab/training

test-arithmetic: $(READY)
	$(ARITHMETIC) $(BIN)/python -m pytest -n 2 --shuffle 1 $(NUMERIC)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/sab bench

# The options of the commands as `sab` knows them before torch is imported, from the commands themselves.
options: $(READY)
	$(BIN)/python -m tools.options

# The tables and figures of docs/performance.md and docs/engine.md, from the records that are kept.
performance: $(READY)
	$(BIN)/python -m tools.performance

# The tables and figures of the pages of results, drop-in.md, rivals.md and the README, from the records that are kept.
results: $(READY)
	$(BIN)/python -m tools.results

# Every file that is read, damaged in 10,000 ways, and 5,000 command lines; other ones with every call.
fuzz: $(READY)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n 2 tests/faults/test_files.py tests/faults/test_command_lines.py

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
