# make demo: install and watch a federation learn. make test: run the tests. make check: all
# that must hold before a commit. make mutants: what the tests would not notice. make hostile: all
# attacks on messages, files and rounds, in under an hour. make notebooks: execute those of the docs.
# make release: build and check the packages for PyPI, identical for each build of a commit.
# make pictures: draw those of the README and the docs again, which takes half an hour of runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests start many processes, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow check mutants hostile docs notebooks pictures format release clean

demo: $(VENV)/.installed
	$(BIN)/fedbayes run

test: $(VENV)/.developing
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

slow: $(VENV)/.developing
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) docs test
	$(BIN)/python -m tests.hostile --quick

mutants: $(VENV)/.developing
	$(BIN)/python -m tests.mutation

hostile: $(VENV)/.developing
	$(BIN)/python -m tests.hostile

docs: $(VENV)/.developing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/.developing
	$(BIN)/python -c "import sys, nbclient, nbformat; [nbformat.write(nbclient.execute( \
	    nbformat.read(p, 4), 'docs/tutorials', record_timing=False), p) for p in sys.argv[1:]]" \
	    docs/tutorials/*.ipynb

pictures: $(VENV)/.developing
	$(BIN)/python docs/figures/draw.py

format: $(VENV)/.developing
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.developing: $(VENV)/.installed papers/pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" --editable papers
	touch $@

# Archives carry the time of the commit, so that two builds of it are the same to the byte.
release: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct)
release: $(VENV)/.developing
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist papers
	$(BIN)/python -m twine check --strict dist/*
	cd dist && sha256sum *.whl *.tar.gz > SHA256SUMS

clean:
	rm -rf $(VENV) build dist mutants
