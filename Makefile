# Needs Python 3.11 or later with pip, and nothing else. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One stamp an interpreter: naming another one starts a fresh environment.
STAMP  := $(VENV)/installed-by-$(subst /,_,$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help demo test ranks check fix bench docs

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(STAMP)  ## train a small model under several policies, side by side
	$(BIN)/python examples/demo.py

TESTS  := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP)  ## run the tests, but for those of many ranks
	$(BIN)/python $(TESTS) -m "not ranks"

ranks: $(STAMP)  ## run the tests that start groups of processes
	$(BIN)/python $(TESTS) -m ranks

check: $(STAMP)  ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fix: $(STAMP)  ## mend what the linter and the formatter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)  ## measure peak memory and step time of the policies
	$(BIN)/python -m benchmarks.run

docs: $(STAMP)  ## check the links, paths and commands in README and docs
	$(BIN)/python tools/check_docs.py

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("actmem needs Python 3.11 or later; name one, as in: make PYTHON=python3.12")'
	test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
