# Two commands for a newcomer: `make demo` and `make test`. Prerequisite on Debian or Ubuntu:
#   sudo apt-get install make python3-venv git

# The first interpreter that is new enough; PYTHON=/path/to/python3 overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONFIG ?= examples/byte_gpt.yaml
BASELINES ?= even-split,proportional,even-pipeline,balanced-pipeline

.PHONY: help venv demo test test-runtime test-ray test-pure lint audit format dashboards pictures docs wheel clean

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

venv: $(READY)  ## Make .venv with everything that demo and tests need

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "lyray needs Python >= 3.11: sudo apt-get install make python3-venv git" >&2; exit 1; }
	@echo "Installing into $(VENV) (torch and Ray: a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3-venv is missing: sudo apt-get install make python3-venv git" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@touch $(READY)

demo: $(READY)  ## Train the demo job: local Ray, emulated unlike devices
	@name=demo-$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/lyray run $(CONFIG) --set run.name=$$name --compare $(BASELINES) && \
	$(BIN)/lyray report runs/$$name

test: $(READY)  ## Run the tiers unit, repo, simulation and runtime (.ci/run: all tiers)
	@$(MAKE) --no-print-directory -j3 test-runtime test-ray test-pure

# Whole runs and what takes Ray: their processes wait often, but must not wait for a processor ...
RAY_TESTS := $(addprefix tests/runtime/,test_ray_* test_faults.py test_s3.py test_runs.py \
  test_evaluation_runs.py test_run_checkpoints.py)
test-ray: $(READY)
	@$(call beside,ray,$(BIN)/python -m pytest -m 'not long' $(RAY_TESTS))

# ... nor must the workers of these, which take as long ...
test-runtime: $(READY)
	$(BIN)/python -m pytest -m 'not long' tests/runtime $(addprefix --ignore-glob=,$(RAY_TESTS))

# ... so what only computes gets the processors that they leave (Ray's workers have nice 15).
test-pure: $(READY)
	@$(call beside,pure,nice -n 19 $(BIN)/python -m pytest -m 'not long' tests/unit tests/repo tests/simulation)

# $(call beside,NAME,COMMAND): what a command says is shown once it is over.
beside = $(2) > $(VENV)/$(1).log 2>&1; ended=$$?; cat $(VENV)/$(1).log; exit $$ended

lint: $(READY)  ## Check format, style, types, import contracts, pins and licences
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pip check
	$(BIN)/python -m pytest -q tests/repo/test_pins.py tests/repo/test_licences.py

# Needs the network; in an environment of its own, as nothing of it is part of ours. --strict: a
# service that does not know a package has not found it harmless.
audit: $(READY)  ## Ask the public database whether pinned versions have known vulnerabilities
	@test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && \
	  $(VENV)/audit/bin/pip install --quiet pip-audit; } || \
	  { echo "pip-audit cannot be installed: it takes the network" >&2; exit 1; }
	@$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt || \
	  { echo "not audited, or vulnerable: see above (without https://pypi.org there is no answer)" >&2; exit 1; }

format: $(READY)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dashboards: $(READY)  ## Write dashboards/*.json from their source
	$(BIN)/python dashboards/build.py

pictures: $(READY)  ## Run the demo and draw its dashboards for docs/img (npm, Chromium, Prometheus)
	$(BIN)/python dashboards/render/pictures.py

docs: $(READY)  ## Build the documentation site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

wheel: $(READY)  ## Build dist/lyray-*.whl
	$(BIN)/python -m build --wheel

clean:  ## Remove what building and testing left; .venv and runs stay
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
