# Each command creates .venv if it is missing or older than pyproject.toml or constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
OTHERS := .venv-integrations
OTHERPIP := $(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread per process: for small matrix products, two threads are slower than one.
export OMP_NUM_THREADS := 1
# Each process takes half of the files, in order, so that what a file prepares is prepared once.
TWO := -n 2 --dist worksteal

.PHONY: help demo test test-all test-here test-integrations soak coverage check perf docs format clean
help:
	@echo "make demo    train EVCL, VCL, EWC and naive on two streams of five tasks: a table, figures and a page"
	@echo "make test    the tests, in less than ten minutes on two cores"
	@echo "make test-all  also the contract tests of every method, the GPU kernels, the documents and the site"
	@echo "make test-integrations  those with other libraries, such as Avalanche, in an environment of their own"
	@echo "make soak    the long tests at full size: hours"
	@echo "make coverage  the tests, and which lines they run: htmlcov/index.html"
	@echo "make check   lint, format, types and layering"
	@echo "make perf    measure speed, as ratios"
	@echo "make docs    build the guides and the API reference as a site: site/index.html"
	@echo "make format  format the code"
	@echo "make clean   remove the environment, the caches and the site"

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "evcl needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/ready
	$(BIN)/evcl demo --overwrite

test: $(VENV)/ready
	$(BIN)/python -m pytest $(TWO)

test-all: test-integrations test-here

test-here: $(VENV)/ready $(VENV)/site $(VENV)/triton $(VENV)/references
	$(BIN)/python -m pytest $(TWO) -m "not soak"

test-integrations: $(OTHERS)/ready
	@if [ -e $(OTHERS)/all ]; then $(OTHERS)/bin/python -m pytest -m "not soak" tests/integrations; fi

soak: $(VENV)/ready
	$(BIN)/python -m pytest -m soak

coverage: $(VENV)/ready
	$(BIN)/python -m pytest $(TWO) --cov --cov-report=term --cov-report=html

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy perf/streams.py
	$(BIN)/lint-imports

# The libraries that the programs of perf/ compare with. bayesian-torch and BackPACK depend on torchvision, which they
# do not use; Avalanche does. If a library cannot be installed, the programs say so and leave it out.
$(VENV)/peers: $(VENV)/ready
	$(PIP) -c constraints.txt -e '.[perf]' && $(PIP) --no-deps -c constraints.txt bayesian-torch backpack-for-pytorch \
	  && $(PIP) -c constraints.txt avalanche-lib && touch $@ || echo "the libraries to compare with could not all be installed" >&2

perf: $(VENV)/peers
	$(BIN)/python perf/step.py
	$(BIN)/python perf/lessons.py
	$(BIN)/python perf/methods.py
	$(BIN)/python perf/peers.py
	$(BIN)/python perf/peers_methods.py
	$(BIN)/python perf/fisher.py
	$(BIN)/python perf/fisher_networks.py
	$(BIN)/python perf/frozen.py
	$(BIN)/python perf/growth.py
	$(BIN)/python perf/coreset.py
	$(BIN)/python perf/tables.py
	$(BIN)/python perf/streams.py
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	  then $(BIN)/python perf/gpu.py; else echo "perf/gpu.py needs an NVIDIA GPU: left out"; fi

# The packages that build the site.
$(VENV)/site: $(VENV)/ready
	$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

# What runs the kernels of a GPU where there is none: Triton's interpreter.
$(VENV)/triton: $(VENV)/ready
	$(PIP) -c constraints.txt -e '.[triton]'
	@touch $@

# A library that a test compares the Kronecker factors with. It depends on torchvision, which nothing here uses; if it
# cannot be installed, the test is skipped.
REFERENCES := curvlinops-for-pytorch backpack-for-pytorch einconv einops jaxtyping linear_operator opt_einsum tqdm \
  unfoldNd wadler_lindig
$(VENV)/references: $(VENV)/ready
	$(PIP) --no-deps -c constraints.txt $(REFERENCES) && touch $@ || echo "curvlinops could not be installed" >&2

# Other libraries, in an environment of their own: they drag in torchvision, whose wheel does not load beside a CPU
# torch (tests/integrations/others.py), and much else. Of Continuum, only what it imports is installed: it also asks for
# linters. If they cannot all be installed, these tests are left out.
CONTINUUM := continuum h5py ImageHash scikit-image imageio lazy-loader tifffile PyWavelets six
$(OTHERS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OTHERS)
	$(OTHERPIP) torch && $(OTHERPIP) -e '.[cli,data,avalanche,transformers,lightning,laplace]' pytest hypothesis datasets \
	  && $(OTHERPIP) --no-deps $(CONTINUUM) peft && touch $(OTHERS)/all || echo "the other libraries could not all be installed" >&2
	@touch $@

docs: $(VENV)/site
	$(BIN)/mkdocs build --strict

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OTHERS) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist htmlcov .coverage*
