# make demo | make test: set up a virtual environment once, then run. The plain commands stand in README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint clean

demo: .installed
	$(BIN)/torchrun --standalone --nproc_per_node 2 -m fedspec_dist.main

test: .installed
	$(BIN)/python -m pytest

test-slow: .installed
	$(BIN)/python -m pytest -m slow

lint: .installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In the checkout, not in the environment: an environment shared by several checkouts is installed for the last one.
.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, PYTHON=$(PYTHON) is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,tensorboard]'
	touch $@

clean:
	rm -rf .venv .installed build *.egg-info
