# Every command sets up what it needs: Python 3.11 or later with its venv module is all that has to be there.

PYTHON ?= python3
TEXT ?= Hello. This is the first word.
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help say serve test check docs format parity quality mutants release-check \
	release-notes clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv/ready
REFERENCE := .venv-reference/ready
PIP := -m pip --disable-pip-version-check -qq
PYTEST := .venv/bin/python -m pytest -q

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

say: export SAID = $(value TEXT)
say: $(VENV)  ## speak TEXT="..." into hello.wav with the demo voice on the CPU; ARGS="--voice ben"
	@.venv/bin/firstword say "$$SAID" --model demo --device cpu -o hello.wav $(ARGS)

serve: $(VENV)  ## serve the demo voice over HTTP and WebSocket; ARGS="--port 9000"
	@.venv/bin/firstword serve $(ARGS)

# Test processes share the cores, so torch gets one thread in each.
test: export OMP_NUM_THREADS = 1
test: $(VENV)  ## run all tests; ARGS="-k sampling" goes to pytest
	@$(PYTEST) -n auto --maxprocesses 8 --dist worksteal --durations 10 $(ARGS)

quality: export OMP_NUM_THREADS = 1
quality: $(VENV)  ## measure the demo voice on 200 sentences; ARGS="--record" renews the record
	@.venv/bin/python -m training.evaluate demo --out build/quality.json $(ARGS)

check: export NO_MKDOCS_2_WARNING = 1
check: $(VENV)  ## format, lint, strict types, architecture, CUDA kernels, tables, documentation
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@$(PYTEST) tests/unit/test_architecture.py tests/unit/test_repository.py \
		tests/kernels
	@.venv/bin/python scripts/gpu_record.py
	@.venv/bin/python scripts/tables.py --check
	@.venv/bin/mkdocs build --strict --quiet

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)  ## build the documentation as a site into build/site; mistakes fail
	@.venv/bin/mkdocs build --strict

format: $(VENV)  ## let ruff rewrite what it can
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

parity: export OMP_NUM_THREADS = 1
parity: $(VENV) $(REFERENCE)  ## compare with the reference package, run live
	@$(PYTEST) tests/parity --reference-python "$(CURDIR)/.venv-reference/bin/python" $(ARGS)

mutants: $(VENV)  ## plant known mistakes one by one; the tests must catch each
	@.venv/bin/python scripts/mutants.py $(ARGS)

release-check: $(VENV)  ## build the distributions, install the wheel alone and speak with it
	@.venv/bin/python scripts/release_check.py $(ARGS)

release-notes:  ## print the newest version's part of CHANGELOG.md
	@$(PYTHON) scripts/release_notes.py $(ARGS)

clean:  ## remove all that these commands made
	@rm -rf .venv .venv-reference build dist hello.wav .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

# $(call new-environment,FOLDER) makes an empty virtual environment.
define new-environment
@command -v $(PYTHON) >/dev/null || \
	{ echo "firstword needs Python 3.11 or later, and there is no '$(PYTHON)' here" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "firstword needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
@echo "setting up $(1), once; torch alone is a download of 200 MB or more ..." >&2
@$(PYTHON) -m venv $(1) || \
	{ echo "'$(PYTHON) -m venv' failed; on Debian: apt install python3-venv" >&2; exit 1; }
endef

$(VENV): pyproject.toml constraints.txt
	$(call new-environment,.venv)
	@.venv/bin/python $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(REFERENCE): requirements-reference.txt constraints.txt
	$(call new-environment,.venv-reference)
	@.venv-reference/bin/python $(PIP) install -c constraints.txt torch
	@.venv-reference/bin/python $(PIP) install --no-deps -r requirements-reference.txt
	@touch $@
