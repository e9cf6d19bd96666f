# make demo | test [LONG=1] | coverage | chaos | check | site | clean. Needs Python 3.11 or newer and nothing else; everything goes into .venv.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.14,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools # what the long tests need besides: TorchRec, Lightning, Ray, Slurm, Prometheus, Chromium
ENGINES := .venv-engines
PARALLEL := --workers 3 # on two cores: tests with processes often wait
PYTEST ?= # more options of pytest

.PHONY: demo test coverage chaos check site clean

demo: $(STAMP)
	@$(BIN)/shardkeep train examples/demo.yaml

test: $(if $(LONG),$(TOOLS),$(STAMP))
ifdef LONG
	@SHARDKEEP_LONG_TESTS=1 $(BIN)/python -m pytest $(PARALLEL) $(PYTEST) -m "not chaos and not gpu" --timeout 1500
else
	@$(BIN)/python -m pytest $(PARALLEL) $(PYTEST)
endif

coverage: $(STAMP)
	@scripts/coverage $(PARALLEL) $(PYTEST)

chaos: $(TOOLS)
	@$(BIN)/python scripts/chaos $(PARALLEL) $(PYTEST)

site: $(TOOLS)
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site && echo "build/site/README.html"

check: $(STAMP)
	@scripts/check

$(STAMP): pyproject.toml constraints.txt scripts/install
	@scripts/install "$(PYTHON)" $(VENV)
	@touch $(STAMP)

$(TOOLS): $(STAMP) scripts/install-all
	@scripts/install-all $(VENV) $(ENGINES)
	@touch $@

clean:
	rm -rf $(VENV) $(ENGINES) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
