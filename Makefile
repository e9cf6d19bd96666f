# make demo | test [LONG=1] | coverage | chaos | check | site | clean. Needs Python 3.11 or newer and nothing else; everything goes into .venv.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.14,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOOPS := $(VENV)/.loops # what the long tests need besides: TorchRec, Lightning, transformers, tensorboard, tritonclient, nbclient
ENGINES := .venv-engines/.installed # Slurm, Ray, and the schemas of other engines
PARALLEL := --workers 3 # on two cores: tests with processes often wait
PYTEST ?= # more options of pytest

.PHONY: demo test coverage chaos check site clean

demo: $(STAMP)
	@$(BIN)/shardkeep train examples/demo.yaml

test: $(if $(LONG),$(LOOPS) $(ENGINES),$(STAMP))
ifdef LONG
	@scripts/install-test-tools
	@SHARDKEEP_LONG_TESTS=1 $(BIN)/python -m pytest $(PARALLEL) $(PYTEST) -m "not chaos and not gpu" --timeout 1500
else
	@$(BIN)/python -m pytest $(PARALLEL) $(PYTEST)
endif

coverage: $(STAMP)
	@scripts/coverage $(PARALLEL) $(PYTEST)

chaos: $(LOOPS) $(ENGINES)
	@scripts/install-test-tools
	@$(BIN)/python scripts/chaos $(PARALLEL) $(PYTEST)

site: $(LOOPS)
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site && echo "build/site/README.html"

check: $(STAMP)
	@scripts/check

$(STAMP): pyproject.toml constraints.txt scripts/install
	@scripts/install "$(PYTHON)" $(VENV)
	@touch $(STAMP)

$(LOOPS): $(STAMP) scripts/install-loops
	@scripts/install-loops $(VENV)
	@touch $(LOOPS)

$(ENGINES): $(STAMP) scripts/install-engines
	@scripts/install-engines $(VENV) $(@D)
	@touch $@

clean:
	rm -rf $(VENV) .venv-engines build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
