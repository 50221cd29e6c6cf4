# Every target does what it needs: on a fresh machine `make test` also makes the virtual environment.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= 2
# Which tests `make test` runs; .ci/run names more.
TESTS ?= --quick
# Files with a test that has a marker: reading all the others takes half a minute on each worker. The first half of the tests has
# the models of tests/zoo.py, the second those of tests/runtime/divided.py: a worker takes one half, and what its tests capture is shared.
ZOO := tests/runtime/test_matrix.py tests/run/test_recovery_matrix.py
MATRIX = $(ZOO) $(filter-out $(ZOO),$(shell grep -rlE --include='test_*.py' 'mark\.matrix|covering import .*selected' tests | sort -r))
RAY = $(shell grep -rl --include='test_*.py' 'mark\.ray' tests)
# The oldest torch that pyproject.toml allows, in an environment of its own, and the tests that reach furthest into torch.
OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST := build/oldest
OLDEST_TESTS ?= tests/capture tests/workers/test_conformance.py tests/runtime/test_comm.py \
	tests/test_custom_operators.py tests/test_torch_names.py
# The packages of the environment with their versions: the constraints without the systems.
PINNED = grep '^[A-Za-z]' $(CONSTRAINTS) | tr _ - | grep -vE '^($(subst $() ,|,$(PEERS)))==' | sort -r
# What hardly a test imports: half of all modules. Python compiles what is left out when it is imported after all.
UNUSED := /(tests|transformers/models|mypy|mypyc|pip|playwright|pygments/lexers|setuptools|sympy/(parsing|physics|stats)|tensorboard|ray/(data|llm|rllib|serve|train|tune))/
# Every process of a test would compile piper/ and the tests again where the environment forbids bytecode.
export PYTHONDONTWRITEBYTECODE :=

# Systems that pages compare with. No dependency of ours: without what they need themselves, in a folder of their own.
SYSTEMS := build/systems
PEERS := torchtitan megatron-core tyro docstring-parser typeguard shtab

.PHONY: help setup test test-all beside wheel systems mutate rules matrix matrix-full attention opinfo transformers ray demo lint format setup-oldest oldest torch-names bench gallery pictures notebooks site

help:
	@echo "make setup    the virtual environment, with everything the tests need"
	@echo "make test     the tests to run again and again (no GPU, network or Ray)"
	@echo "make test-all  those and the longer ones, which tests/extended.toml lists"
	@echo "make wheel    the wheel of the sdist in an empty environment: the README, piper init, train, check, view, export, import"
	@echo "make systems  runs of TorchTitan and Megatron-Core themselves go on in Piper, or have its losses (downloads 24 MB)"
	@echo "make matrix   compositions in which every two choices meet; make matrix-full: every composition"
	@echo "make attention  every shape, mask and layout of attention that meet in pairs, and every draw"
	@echo "make rules    every rule of a sharded operation in every layout, on torch's own samples: an hour of one core"
	@echo "make mutate   do the tests notice? They run against small edits of piper/; MUTATE=--help says how to choose"
	@echo "make opinfo   every operation that torch itself tests: equal to eager PyTorch, or refused as tests/opinfo/refused.txt says"
	@echo "make transformers CHECKOUT=DIR  the models of transformers' own tests, in a clone of it, beside plain PyTorch; MODELS=\"arcee bert\": some"
	@echo "make ray      the tests on Ray: a cluster of our own, two nodes of it, on this machine only"
	@echo "make demo     train a small mixture of experts on four local workers, for about a minute"
	@echo "make lint     ruff and mypy; make format: let ruff write"
	@echo "make oldest   types and some tests with the oldest supported torch, in build/oldest (downloads gigabytes)"
	@echo "make torch-names  tests/torch_names.txt: the private names of torch that piper/ reads, verified with the oldest"
	@echo "make bench    how compile time grows with the job"
	@echo "make gallery  docs/gallery.md: every schedule and the papers' figures, drawn"
	@echo "make pictures the other pictures of the documentation"
	@echo "make notebooks  docs/notebooks: run their cells, and write what they show"
	@echo "make site     build/site: the documentation as static pages with search, to open without a network"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11; name another one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot make virtual environments; install its venv package (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@# Two at a time, the large ones first, which pip does not do. What this leaves out the next line installs, and it verifies all.
	@$(PINNED) | xargs -P 2 -n 20 $(BIN)/python -m pip install --quiet --no-compile --no-deps || true
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[dev]'
	@# On all cores, which pip does not do. Some packages hold templates that are not Python: those are left out.
	@$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib piper || true
	@touch $@

# Each worker takes one half of the files and then helps the other: what the tests of a file share is made once.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(TESTS)

test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# One after the other, also where one fails, beside other tests: all of these wait much.
beside: setup
	@failed=0; for each in ray wheel systems; do $(MAKE) --no-print-directory $$each || failed=1; done; exit $$failed

wheel: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/test_wheel.py

systems: setup $(SYSTEMS)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(SYSTEMS) $(BIN)/python -m pytest -q -m slow tests/docs/test_real_systems.py tests/benchmarks/test_gpu_systems.py

$(SYSTEMS)/.installed: $(CONSTRAINTS) $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --constraint $(CONSTRAINTS) --target $(SYSTEMS) $(PEERS)
	@touch $@

mutate: setup
	OMP_NUM_THREADS=1 nice -n 15 $(BIN)/python -m tests.mutation.run --summary build/mutation.json $(MUTATE)

matrix: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m matrix $(MATRIX)

matrix-full: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "matrix or exhaustive" $(MATRIX)

attention: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "slow or not slow" \
		tests/runtime/test_attention_layouts.py tests/runtime/test_divided_draws.py

rules: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q -n $(WORKERS) -m slow tests/capture/shard

ray: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m ray $(RAY)

# Every operation and module that torch itself tests, and every operator of Python: for the night.
opinfo: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m slow tests/opinfo

# For the night as well: 480 folders of models.
transformers: setup
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python tests/architectures/theirs.py $(CHECKOUT) $(MODELS)

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/piper train recipes/moe_dualpipe.py:demo --on local

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MYPY_UNDER) $(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With these two variables every other target runs with the oldest torch as well.
setup-oldest: $(OLDEST).txt
	@$(MAKE) --no-print-directory setup VENV=$(OLDEST) CONSTRAINTS=$(OLDEST).txt

$(OLDEST).txt: pyproject.toml constraints.txt
	@mkdir -p $(@D)
	sed 's/^torch==.*/torch==$(OLDEST_TORCH)/' constraints.txt > $@

oldest: setup-oldest
	$(OLDEST)/bin/python -m tests.torch_names
	$(OLDEST)/bin/python -m mypy --cache-dir $(OLDEST)/.mypy_cache
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(OLDEST_TESTS)
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -m slow tests/test_wheel.py

torch-names: setup-oldest
	$(OLDEST)/bin/python -m tests.torch_names --write

bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/compile_scale.py

gallery: setup
	$(BIN)/python docs/gallery.py

pictures: setup
	$(BIN)/python docs/pictures/draw.py

notebooks: setup
	OMP_NUM_THREADS=1 $(BIN)/python docs/notebooks/run.py

site: setup
	$(BIN)/python docs/site/build.py
