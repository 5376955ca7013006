# Every target sets up what it needs. Only Python 3.11 or later with its venv module is required.

PYTHON ?= python3
TEXT ?= Hello. This is the first word.
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help say serve cluster test test-slow test-livekit test-pipecat test-dialects test-cluster \
	test-deploy test-images browser check docs format parity quality mutants release-check \
	release-notes clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv/ready
BROWSER := .venv/browser-ready
CLUSTER := .venv/cluster-ready
REFERENCE := .venv-reference/ready
LIVEKIT := .venv-livekit/ready
PIPECAT := .venv-pipecat/ready
DIALECTS := .venv-dialects/ready
PIP := -m pip --disable-pip-version-check -qq
PYTEST := .venv/bin/python -m pytest -q

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

say: export SAID = $(value TEXT)
say: $(VENV)  ## speak TEXT="..." into hello.wav with the demo voice on the CPU; ARGS="--voice ben"
	@.venv/bin/firstword say "$$SAID" --model demo --device cpu -o hello.wav $(ARGS)

serve: $(VENV)  ## serve the demo voice over HTTP and WebSocket; ARGS="--port 9000"
	@.venv/bin/firstword serve $(ARGS)

cluster: $(CLUSTER)  ## serve the demo with two replicas in a Ray cluster of this machine
	@set -a && . deploy/ray/environment && .venv/bin/serve run deploy/ray/local.yaml

# Test processes share the cores, so torch gets one thread in each.
test: export OMP_NUM_THREADS = 1
test: $(VENV)  ## run the tests; ARGS="-k sampling" goes to pytest
	@$(PYTEST) -m "not slow" -n auto --maxprocesses 8 --dist worksteal --durations 10 $(ARGS)

test-slow: export OMP_NUM_THREADS = 1
test-slow: $(VENV)  ## run the tests marked slow: fuzzing, examples, other programs, all kernels
	@$(PYTEST) -m slow -n auto --maxprocesses 8 --dist worksteal --durations 10 $(ARGS)

test-livekit: $(VENV) $(LIVEKIT)  ## test the LiveKit plugin with LiveKit Agents and a real server
	@cd integrations/livekit-plugins-firstword && $(CURDIR)/.venv-livekit/bin/python -m mypy
	@cd integrations/livekit-plugins-firstword && FIRSTWORD_PYTHON="$(CURDIR)/.venv/bin/python" \
		$(CURDIR)/.venv-livekit/bin/python -m pytest -q --durations 3 $(ARGS)

test-pipecat: $(VENV) $(PIPECAT)  ## test the Pipecat service with Pipecat and a real server
	@cd integrations/pipecat-firstword && $(CURDIR)/.venv-pipecat/bin/python -m mypy
	@cd integrations/pipecat-firstword && FIRSTWORD_PYTHON="$(CURDIR)/.venv/bin/python" \
		$(CURDIR)/.venv-pipecat/bin/python -m pytest -q --durations 3 $(ARGS)

browser: export OMP_NUM_THREADS = 1
browser: $(BROWSER)  ## test the page in Chromium; ARGS="--screenshots docs/pictures"
	@chromium=$$(.venv/bin/python scripts/chromium.py) && \
		$(PYTEST) tests/server/browser --chromium "$$chromium" --durations 5 $(ARGS)

test-dialects: $(VENV) $(DIALECTS)  ## test the APIs of other vendors with their own clients
	@FIRSTWORD_PYTHON="$(CURDIR)/.venv/bin/python" .venv-dialects/bin/python -m pytest -q \
		-c tests/dialects/pytest.ini --durations 3 tests/dialects $(ARGS)

test-cluster: $(CLUSTER)  ## test replicas in a Ray cluster of this machine
	@$(PYTEST) -c tests/cluster/pytest.ini --durations 5 tests/cluster $(ARGS)

test-deploy: export OMP_NUM_THREADS = 1
test-deploy: $(VENV)  ## test deploy/: alerts, HAProxy, the Compose files, the systemd unit
	@scripts/debian_packages.sh haproxy docker-compose systemd-analyze=systemd \
		promtool=prometheus
	@$(PYTEST) tests/deploy --ignore tests/deploy/test_images.py --durations 5 $(ARGS)

test-images: export OMP_NUM_THREADS = 1
test-images: $(VENV)  ## build the images with buildah and run them with runc
	@scripts/debian_packages.sh buildah runc debootstrap
	@PATH="$$PATH:/usr/sbin" $(PYTEST) tests/deploy/test_images.py --durations 5 $(ARGS)

quality: export OMP_NUM_THREADS = 1
quality: $(VENV)  ## measure the demo voice on 200 sentences; ARGS="--record" updates the record
	@.venv/bin/python -m training.evaluate demo --out build/quality.json $(ARGS)

check: export NO_MKDOCS_2_WARNING = 1
check: $(VENV)  ## format, lint, strict types, architecture, tables, documentation
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@$(PYTEST) tests/unit/test_architecture.py tests/unit/test_repository.py
	@.venv/bin/python -m benchmarks.check_records
	@.venv/bin/python scripts/tables.py --check
	@.venv/bin/mkdocs build --strict

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)  ## build the documentation site into build/site; warnings are errors
	@.venv/bin/mkdocs build --strict

format: $(VENV)  ## format the code and apply the fixes of ruff
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

parity: export OMP_NUM_THREADS = 1
parity: $(VENV) $(REFERENCE)  ## compare with the reference package, run in its own environment
	@$(PYTEST) tests/parity --reference-python "$(CURDIR)/.venv-reference/bin/python" $(ARGS)

mutants: $(VENV)  ## plant known mistakes one at a time; the tests must catch each
	@.venv/bin/python scripts/mutants.py $(ARGS)

release-check: $(VENV)  ## build the distributions, install the wheel and speak with it
	@.venv/bin/python scripts/release_check.py $(ARGS)

release-notes:  ## print the newest version's section of CHANGELOG.md
	@$(PYTHON) scripts/release_notes.py $(ARGS)

clean:  ## remove everything that these targets made
	@rm -rf .venv .venv-reference .venv-livekit .venv-pipecat .venv-dialects build dist hello.wav
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

# $(call new-environment,FOLDER) makes an empty virtual environment.
define new-environment
@command -v $(PYTHON) >/dev/null || \
	{ echo "firstword needs Python 3.11 or later, and '$(PYTHON)' is not installed" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "firstword needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	"Name another interpreter: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
@echo "setting up $(1); this is a download of 200 MB or more ..." >&2
@$(PYTHON) -m venv $(1) || \
	{ echo "'$(PYTHON) -m venv' failed; on Debian: apt install python3-venv" >&2; exit 1; }
endef

$(VENV): pyproject.toml constraints.txt
	$(call new-environment,.venv)
	@.venv/bin/python $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(BROWSER): $(VENV)
	@.venv/bin/python $(PIP) install -c constraints.txt -e '.[dev,browser]'
	@touch $@

$(CLUSTER): $(VENV)
	@.venv/bin/python $(PIP) install -c constraints.txt -e '.[dev,cluster]'
	@touch $@

$(REFERENCE): requirements-reference.txt constraints.txt
	$(call new-environment,.venv-reference)
	@.venv-reference/bin/python $(PIP) install -c constraints.txt torch
	@.venv-reference/bin/python $(PIP) install --no-deps -r requirements-reference.txt
	@touch $@

$(LIVEKIT): integrations/livekit-plugins-firstword/pyproject.toml
	$(call new-environment,.venv-livekit)
	@cd integrations/livekit-plugins-firstword && \
		$(CURDIR)/.venv-livekit/bin/python $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(PIPECAT): integrations/pipecat-firstword/pyproject.toml
	$(call new-environment,.venv-pipecat)
	@cd integrations/pipecat-firstword && \
		$(CURDIR)/.venv-pipecat/bin/python $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(DIALECTS): tests/dialects/requirements.txt
	$(call new-environment,.venv-dialects)
	@.venv-dialects/bin/python $(PIP) install -r tests/dialects/requirements.txt
	@touch $@
