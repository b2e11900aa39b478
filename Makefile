# make run    install into .venv and show what Stockade does: stockade demo
# make check  ruff, mypy and the unit tests, in less than a minute: the inner loop
# make docs   build the documentation as a site in build/site
# make test   install what the tests need and run all of them

VENV ?= .venv
# The system's Python first: one in a home directory (pyenv) cannot be entered by other users.
PYTHON ?= $(shell for python in /usr/bin/python3 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

GATE := $(wildcard src/stockade/gate/src/*.[ch]) src/stockade/gate/build.py
# An editable install: Python sources are used where they lie, so only these ask for a new one.
INSTALL_AFTER := pyproject.toml setup.py src/stockade/_version.py $(GATE)
ALONE := tests/requirements-alone.txt
# Without the notice of the theme about its successor; warnings stay, and end the build.
SITE := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq

.PHONY: run check check-lint check-types check-unit docs test gate-check clean

run: $(VENV)/.installed
	@$(VENV)/bin/stockade demo

check: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --output-sync --keep-going -j3 check-lint check-types check-unit

check-lint:
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

check-types:
	@$(VENV)/bin/mypy

check-unit:
	@$(VENV)/bin/python -m pytest -q tests/unit

docs: $(VENV)/.installed-docs
	@$(SITE) && echo "build/site/index.html"

test: $(VENV)/.installed-test
	@PYTHONPATH='$(CURDIR)/tests' $(VENV)/bin/python -m support.suite

gate-check:
	@python3 src/stockade/gate/build.py check

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer with venv is needed: apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/pyvenv.cfg $(INSTALL_AFTER)
	@echo "installing stockade into $(VENV)"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-docs: $(VENV)/pyvenv.cfg $(INSTALL_AFTER)
	@echo "installing what builds the documentation into $(VENV)"
	@$(PIP) install --editable '.[docs]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-test: $(VENV)/pyvenv.cfg $(INSTALL_AFTER) $(ALONE)
	@echo "installing stockade and what its tests need into $(VENV)"
	@$(PIP) install --editable '.[test]'
	@$(PIP) install --no-deps -r $(ALONE)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

clean:
	rm -rf build dist src/*.egg-info src/stockade/gate/bin $(VENV)
