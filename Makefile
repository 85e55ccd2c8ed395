# Two commands: `make demo` and `make test`. Each makes the virtual environment it needs, with no more in it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CORE = $(VENV)/.core
READY = $(VENV)/.ready
PIP = $(BIN)/pip install --quiet --no-compile --constraint constraints.txt

.PHONY: demo figures test test-research test-engines mutants lint types docs dist sbom bench clean

demo: $(CORE)  # four made-up hospitals train one model, in the commands that a user types
	$(BIN)/python examples/demo.py

figures: $(CORE)  # the paper's comparison on breast cancer data: docs/comparison.md
	$(BIN)/python -m research compare

test: $(READY) lint types
	$(BIN)/pytest -n 6 --dist loadgroup --no-loadscope-reorder

test-research: $(READY)
	$(BIN)/pytest -n 6 --dist loadgroup --no-loadscope-reorder research/tests

mutants: $(READY)  # plant every known mistake: the probes of the audit must catch them all
	PYTHONPATH=tests $(BIN)/python -m mistakes

# The tests of an engine against another version of it, in the folder build/engines: make test-engines ENGINE=flwr==1.42.0
ENGINE ?= flwr==1.42.0
ENGINE_TESTS = tests/wire tests/federation/test_end_to_end.py
test-engines: $(READY)
	rm -rf build/engines && mkdir -p build/engines
	$(PYTHON) -m venv --system-site-packages build/engines/venv
	realpath src $(VENV)/lib/python3*/site-packages > $$(realpath build/engines/venv/lib/python3*/site-packages)/later.pth
	build/engines/venv/bin/python -m pip install --quiet --no-compile --upgrade '$(ENGINE)'
	build/engines/venv/bin/python -m pytest -n 2 --dist loadgroup $(ENGINE_TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)  # with the Node.js of a wheel: nothing is downloaded when it runs
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(READY)  # the site, into site/; no warning, no dead link (--quiet would hide both from --strict)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY)  # sdist, and a wheel for this platform with the C code, into dist/
	$(BIN)/python -m build --no-isolation

sbom:  # what a user of the wheel gets, with licences: CycloneDX, from an environment that holds nothing else
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	build/sbom/bin/pip install --quiet --no-compile --constraint constraints.txt .
	$(PYTHON) -m venv build/sbom-tool
	build/sbom-tool/bin/pip install --quiet --constraint constraints.txt cyclonedx-bom
	mkdir -p dist
	build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file dist/silodp.cdx.json build/sbom/bin/python

bench:  # in an environment of its own, see benchmarks/requirements.txt
	$(PYTHON) -m venv $(VENV)/peers
	$(VENV)/peers/bin/pip install --quiet torch==2.13.0
	$(VENV)/peers/bin/pip install --quiet --requirement benchmarks/requirements.txt --editable .
	$(VENV)/peers/bin/pip install --quiet --no-deps pfl==0.6.0
	$(VENV)/peers/bin/python -m benchmarks
	$(VENV)/peers/bin/python -m benchmarks.noise

$(CORE): pyproject.toml setup.py constraints.txt $(wildcard src/silodp/engine/c/*.c)  # what users have, and nothing else; pip builds the C code
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

$(READY): $(CORE)
	$(PIP) --editable '.[dev,nvflare,flower,docs,onnx,ui]'
	@# what pip would do on one core; templates of cookiecutters among the files are no Python, hence "|| true"
	@# src too: where PYTHONDONTWRITEBYTECODE is set, each of the tests' processes would compile all of it again
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src >/dev/null 2>&1 || true
	touch $@

clean:
	rm -rf $(VENV) build demo demo-* dist site src/*.egg-info src/silodp/engine/c/*.so
