# Two commands: `make demo` and `make test`. Each makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint types bench clean

demo: $(READY)
	$(BIN)/silodp compare

test: $(READY) lint
	$(BIN)/pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/noise.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
