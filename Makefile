# Two commands: `make demo` and `make test`. Each makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint types bench clean

demo: $(READY)
	$(BIN)/silodp compare

test: $(READY) lint
	$(BIN)/pytest -n 2 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench:  # in an environment of its own, see benchmarks/requirements.txt
	$(PYTHON) -m venv $(VENV)/peers
	$(VENV)/peers/bin/pip install --quiet torch==2.13.0
	$(VENV)/peers/bin/pip install --quiet --requirement benchmarks/requirements.txt --editable .
	$(VENV)/peers/bin/pip install --quiet --no-deps pfl==0.6.0
	$(VENV)/peers/bin/python -m benchmarks
	$(VENV)/peers/bin/python -m benchmarks.noise

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,nvflare,flower,ui]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
