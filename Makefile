# Two commands: `make demo` and `make test`. Each makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint types docs bench clean

demo: $(READY)
	$(BIN)/silodp compare

test: $(READY) lint types
	$(BIN)/pytest -n 3 --dist loadgroup --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)  # with the Node.js of a wheel: nothing is downloaded when it runs
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(READY)  # the site, into site/; no warning, no dead link (--quiet would hide both from --strict)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench:  # in an environment of its own, see benchmarks/requirements.txt
	$(PYTHON) -m venv $(VENV)/peers
	$(VENV)/peers/bin/pip install --quiet torch==2.13.0
	$(VENV)/peers/bin/pip install --quiet --requirement benchmarks/requirements.txt --editable .
	$(VENV)/peers/bin/pip install --quiet --no-deps pfl==0.6.0
	$(VENV)/peers/bin/python -m benchmarks
	$(VENV)/peers/bin/python -m benchmarks.noise

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,nvflare,flower,docs,onnx,ui]'
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib  # what pip would do on one core; templates among the files are no Python
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info
