# Two commands: `make demo` shows it, `make test` proves it. Both need only Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.PHONY: demo test nginx lint fast bench bench-simulation bench-privacy bench-mcmahan bench-federation clean help

help:            ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

demo: $(READY)   ## 200 virtual clients learn handwritten digits
	$(BIN)/fedplat simulate

test: $(READY) nginx  ## lint, types, import contracts and all tests
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest

nginx:           ## the server's front; installed where the machine has apt and we are root
	@PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || { \
	  command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light >/dev/null; } || \
	  echo "nginx is not installed: tests of real federations will be skipped (apt-get install nginx-light)"

fast: $(READY)   ## the tests that take no more than a few seconds each
	$(BIN)/python -m pytest -m "not slow"

lint: $(READY)   ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## speed and memory of the foundation, beside the limit
	$(BIN)/python -m benchmarks.foundation

bench-simulation: $(READY)  ## our engines beside Flower + Ray, pfl and a bare PyTorch loop
	$(BIN)/python -m benchmarks.simulation

bench-privacy: $(READY)  ## private training beside Opacus: make bench-privacy DATA=PATH/TO/MNIST
	$(BIN)/python -m benchmarks.privacy $(if $(DATA),--data $(DATA))

bench-mcmahan: $(READY)  ## rounds to 97 % on MNIST beside the FedAvg paper: make bench-mcmahan DATA=PATH/TO/MNIST
	$(BIN)/python -m benchmarks.mcmahan --data $(DATA)

bench-federation: $(READY) nginx  ## real processes over TLS beside plain Flower: round time, large models, memory
	$(BIN)/python -m benchmarks.federation

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
