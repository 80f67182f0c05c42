# `make help` lists the targets. Each sets up .venv first if it is missing; `make` alone does only that.
PYTHON ?= python3
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/python
PACKAGES := pretrain laboratory megatron_patches data_pipeline ds_configs slurm tests benchmarks tools docs/figures docs/site
PUBLIC := pretrain/api.py megatron_patches/attention/module.py # what other people's programs import
.DELETE_ON_ERROR:
.PHONY: demo demo-clean site results-figures test test-slow test-fast test-all test-slurm test-kernels test-oldest test-newest release-check faults fuzz record lint format bench gpu-check gpu-dry clean help

# $(call environment,DIRECTORY): a virtual environment of $(PYTHON), if it is not there yet.
define environment
	@$(PYTHON) -c 'import sys; sys.exit("error: Python >= 3.10 is needed, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(1)
endef
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# Where torch comes from on a machine without a GPU: 0.2 GB in place of 2.5. TORCH_INDEX= leaves the build to pip, as a
# machine with Slurm does, whose GPUs are on other nodes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# What the program and its comparisons need (78 packages), and what the tests and the other verbs need beside it.
$(VENV)/core: pyproject.toml constraints.txt
	@echo "Installing the program into $(VENV): about 80 packages, two minutes,"
	@echo "1.7 GB with the CPU build of torch."
	$(call environment,$(VENV))
	@if test -n "$(TORCH_INDEX)" && ! command -v nvidia-smi >/dev/null && ! command -v sbatch >/dev/null && ! $(VENV)/bin/python -c 'import torch' 2>/dev/null; then \
		echo "No GPU and no Slurm here: torch's CPU build (make TORCH_INDEX= for pip's own choice)."; \
		$(VENV)/bin/python $(PIP_INSTALL) --retries 1 --timeout 15 --index-url $(TORCH_INDEX) $$(grep ^torch== constraints.txt) \
			|| echo "It cannot be had there: the build that pip finds, which may be for GPUs."; \
	fi
	@$(VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[compare]'
	@touch $@

$(VENV)/installed: $(VENV)/core
	@echo "Installing what tests and all verbs need: about 110 packages more, two minutes."
	@$(VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

# --- demo: real text to two trained models, offline, on 4 local processes -------------------------------------------
DEMO := demo
demo: $(VENV)/core ## text to two trained models and their comparison, offline, about five minutes
	@$(RUN) -m pretrain demo --out $(DEMO)
	@echo "The commands of the pages need the environment: source $(VENV)/bin/activate"
	@echo "Watch both runs: $(VENV)/bin/tensorboard --logdir $(DEMO)/runs"

demo-clean: ## remove what demo made
	rm -rf $(DEMO)

# --- results: each page of docs/results has the commands of its runs ---------------------------------------------------
results-figures: $(VENV)/installed ## the drawings of docs/figures, and a check of all numbers of docs/results, from the tables beside them
	$(RUN) -m docs.figures.draw
	$(RUN) -m laboratory.results.numbers

# --- checks -----------------------------------------------------------------------------------------------------------
# What is in which, and how long each takes: tests/README.md. TEST_JOBS processes, because many tests wait for others;
# TEST_JOBS=0 runs all tests in one. test-fast does not even import what it runs no test of.
TEST_JOBS ?= 5
# Where the environment forbids it, every process would compile this program anew, and pytest rewrite all tests.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := -m pytest --no-loadscope-reorder
MARKED_WHOLE = $(shell grep -rlE --exclude-dir=distributed '^pytestmark = .*(distributed|slow)' tests)
TEST_FAST = -m "not distributed and not slurm and not gpu and not slow and not full" $(addprefix --ignore=,tests/distributed tests/slurm $(MARKED_WHOLE))
test: $(VENV)/installed ## the suite but for slow and full tests, on real processes, drills on a private Slurm included
	$(RUN) $(PYTEST) -n $(TEST_JOBS) -m "not slow and not full"

test-slow: $(VENV)/installed ## what CI runs beside it: one feature each on real ranks, sweeps, README's commands, lm-eval
	$(RUN) $(PYTEST) -n $(TEST_JOBS) -m "slow and not full"

test-fast: $(VENV)/installed ## tests that start no processes and take no seconds each: a minute
	$(RUN) $(PYTEST) -n 2 $(TEST_FAST)

test-all: $(VENV)/installed ## the whole cross products too
	$(RUN) $(PYTEST) -n $(TEST_JOBS) -m ""

# Needs slurm-wlm and munge, else it says so and skips.
test-slurm: $(VENV)/installed ## only the drills on a private Slurm
	$(RUN) -m pytest -m slurm

# Older CPUs round otherwise: what the suite asks for must hold on each, so it runs with the kernels of each that this CPU
# has. Before a release, on a CPU with AVX512 or AMX.
KERNELS ?= sse avx2 $(if $(shell grep -m1 -o avx512f /proc/cpuinfo),avx512)
kernels_sse := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem
kernels_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
kernels_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 OPENBLAS_CORETYPE=SkylakeX
test-kernels: $(addprefix test-kernels-,$(KERNELS)) ## the whole suite with the kernels of older CPUs, one after the other; KERNELS="sse avx2 avx512"
test-kernels-%: $(VENV)/installed
	env $(kernels_$*) OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -n $(TEST_JOBS) -m "not full and not slurm"

# Real runs are killed, suspended, starved of disk and damaged at random, and must come out as if nothing had been.
FAULTS ?= 60
SEED ?= 1
RECORD ?= build/faults.jsonl
faults: $(VENV)/installed ## a campaign of random faults into docs/reliability.md, a quarter of an hour; continues where it was interrupted; FAULTS=60 SEED="1 2" RECORD=FILE
	$(RUN) -m tools.faults --faults $(FAULTS) --seed $(SEED) --record $(RECORD) --into docs/reliability.md

# The fast suite and the golden loss curves with the lowest versions that pyproject.toml allows, and with the newest there
# are, each in an environment of its own for every Python. The newest megatron-core needs Python >= 3.12:
#   make test-oldest PYTHON=python3.10   ·   make test-newest PYTHON=python3.12
GOLDEN_CURVES := -m pytest tests/distributed/test_designs.py -k golden
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OLDEST := .venv-oldest-$(PYTHON_VERSION)
NEWEST := .venv-newest-$(PYTHON_VERSION)
test-oldest: $(OLDEST)/installed ## the fast suite and golden curves with the lowest versions allowed; PYTHON=python3.10
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) $(TEST_FAST)
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(GOLDEN_CURVES)

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	$(call environment,$(OLDEST))
	$(OLDEST)/bin/python $(PIP_INSTALL) --constraint constraints-oldest.txt --editable '.[test]'
	@touch $@

test-newest: ## the fast suite and golden curves with the newest versions there are; PYTHON=python3.12
	$(call environment,$(NEWEST))
	$(NEWEST)/bin/python $(PIP_INSTALL) --upgrade --upgrade-strategy eager --editable '.[test]'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python $(PYTEST) $(TEST_FAST)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python $(GOLDEN_CURVES)

# Readers of every format on damaged files: the right value or one sentence. `make test` tries 25 examples of each property.
EXAMPLES ?= 10000
fuzz: $(VENV)/installed ## property tests of all readers, three hours on one core; EXAMPLES=10000 SEED=1
	ORA_FUZZ_EXAMPLES=$(EXAMPLES) $(RUN) -m pytest tests/fuzz --hypothesis-seed $(SEED) --timeout 0

# What a refactoring must leave byte-equal. Last bits of trained weights depend on how the machine rounds, which the file names.
RECORDED ?= tests/recorded/v0.5-lab.json
PARTS ?=
record: $(VENV)/installed ## is what must stay byte-equal what it was at v0.5-lab? Half a minute; PARTS=bank,init RECORDED=FILE
	$(RUN) -m tools.record --against $(RECORDED) $(if $(PARTS),--parts $(PARTS))

# RELEASE_OPTIONS=--short trains 20 steps in place of 240.
PYTHONS ?= python3.10 python3.13
RELEASE_OPTIONS ?=
release-check: $(VENV)/installed ## sdist and wheel in empty environments do demo, try, compare-losses; PYTHONS="python3.10 python3.13" TORCH_INDEX=
	$(VENV)/bin/python -m tools.release $(PYTHONS) --torch-index "$(TORCH_INDEX)" $(RELEASE_OPTIONS)

lint: $(VENV)/installed ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check $(PACKAGES)
	$(VENV)/bin/ruff format --check $(PACKAGES)
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --strict $(PUBLIC)

format: $(VENV)/installed ## format the code, and fix what ruff can fix
	$(VENV)/bin/ruff check --fix $(PACKAGES)
	$(VENV)/bin/ruff format $(PACKAGES)

bench: $(VENV)/installed ## all benchmarks
	$(RUN) -m benchmarks.bank
	$(RUN) -m benchmarks.step.measure
	$(RUN) -m benchmarks.checkpoint
	$(RUN) -m benchmarks.samples
	$(RUN) -m benchmarks.inference

# --- pages ------------------------------------------------------------------------------------------------------------
$(VENV)/site: $(VENV)/core
	@$(VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[site]'
	@touch $@

site: $(VENV)/site ## all pages as a site in build/site-pages/html that works offline; a dead link ends it with an error
	@$(VENV)/bin/python docs/site/build.py

# --- a machine with a GPU -------------------------------------------------------------------------------------------------
GPU_RESULTS ?=
GPU_OPTIONS ?=
gpu-check: $(VENV)/installed ## what a GPU must show, in a quarter of an hour, offline, into docs/results/gpu; GPU_RESULTS=DIRECTORY
	$(VENV)/bin/python -m benchmarks.gpu $(if $(GPU_RESULTS),--out $(GPU_RESULTS)) $(GPU_OPTIONS)

gpu-dry: $(VENV)/installed ## host waits and copies of a training step on a GPU, counted without one, in about two minutes
	$(RUN) -m benchmarks.gpu_dry

clean: demo-clean ## remove the environments and caches too
	rm -rf $(VENV) .venv-oldest-* .venv-newest-* *.egg-info build .pytest_cache .mypy_cache .ruff_cache
