# make demo        the demonstration: three recipes trained, measured and compared
# make test        the default suite (no slow, no gpu tests)
# make test-slow   the slow half
# make coverage    the default suite with its lines counted: fails below 90 %; by hand, it takes a third longer
# make test-plugin the example plugin's own tests, as its author would run them
# make lint        ruff, mypy, import contracts
# make gpu-check   the tests that need a GPU; PYTHON=/path/to/python runs them outside .venv
# make clean       remove caches and build outputs (.venv stays)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .peers/.installed
BASE_PYTHON ?= python3
PYTHON ?= $(BIN)/python
WORKERS ?= 2
PYTEST_ARGS ?=
EXAMPLE := plugins/hybridtf-example

.DELETE_ON_ERROR:
.PHONY: demo test test-slow test-plugin coverage lint gpu-check clean

# One thread a process: with as many workers as cores, more threads only fight each other, and on a loaded machine two
# threads can be many times slower than one.
test test-slow test-plugin: export OMP_NUM_THREADS := 1
test test-slow test-plugin: export MKL_NUM_THREADS := 1

demo: $(STAMP)
	$(BIN)/hybridtf compare demo/attention demo/mamba2 demo/hybrid -o runs/demo

test: $(STAMP) $(PEERS)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist worksteal --timeout 300 $(PYTEST_ARGS)

coverage: override PYTEST_ARGS += --cov=hybridtf --cov-report=term --cov-fail-under=90
coverage: test

test-slow: $(STAMP) $(PEERS)
	$(BIN)/python -m pytest -m "slow and not gpu" -n $(WORKERS) --dist worksteal --timeout 1800 $(PYTEST_ARGS)

test-plugin: $(STAMP)
	cd $(EXAMPLE) && $(CURDIR)/$(BIN)/python -m pytest -m "not gpu" --timeout 300 $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gpu-check: $(if $(filter $(BIN)/python,$(PYTHON)),$(STAMP))
	@rc=0; $(PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)' || rc=$$?; \
	if [ $$rc -eq 3 ]; then \
		echo "gpu-check: no GPU (torch.cuda.is_available() is false with $(PYTHON)); nothing was checked"; \
	elif [ $$rc -ne 0 ]; then \
		echo "gpu-check: $(PYTHON) cannot import torch" >&2; exit $$rc; \
	else \
		$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS); \
	fi

$(BIN)/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "hybridtf needs Python 3.11 or newer; $(BASE_PYTHON) is older (set BASE_PYTHON=...)" >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

# Installed on first use, and again when a dependency list changes.
$(STAMP): pyproject.toml constraints.txt $(EXAMPLE)/pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[report,text,test,dev]' -e $(EXAMPLE)
	touch $@

# References that only tests read, in a folder of their own: see tests/peers.py. lm-eval runs in a process of its own.
$(PEERS): constraints-peers.txt constraints-lm-eval.txt | $(STAMP)
	rm -rf .peers
	$(BIN)/python -m pip install --no-deps --no-compile --target .peers -r constraints-peers.txt
	$(BIN)/python -m pip install --no-deps --no-compile --target .peers/lm-eval -r constraints-lm-eval.txt
	touch $@

clean:
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
