# make run   sets everything up and generates Python code with the embedded pair
# make serve  sets everything up and serves the embedded pair at http://127.0.0.1:8080; ARGS="-m target.gguf -md drafter.gguf" serves others
# make test  sets everything up and runs the tests; make test-fast those that are not marked slow, in a minute
# make test-train  installs torch and runs the tests of `pyspec train`
# make cuda  then builds for NVIDIA GPUs, with the patches; ARCH=90 names others than that of this machine (half an hour)
# make wheel  builds a wheel in dist/ with all libraries inside, for every x86-64 processor; ARCH="80;90" for NVIDIA GPUs too
# make lint  ruff (layout and rules), mypy, and what pages and generated files say
# make test-sanitized  runs tests over the extension with address and undefined-behaviour sanitizers, and proves that they find something
# make test-patches  builds llama.cpp with the patches and runs its tests; the build is kept in the user's cache
# Set-up needs Python 3.11 or newer, a compiler for C and C++ and CMake's build tools; everything else is Python packages. Building llama-cpp-python
# takes minutes the first time (its wheel is kept), and so do llama.cpp with the patches and the CPU kernels of the extension.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run serve test test-fast test-train cuda wheel lint test-patches test-sanitized clean
.DEFAULT_GOAL := run

$(READY): pyproject.toml CMakeLists.txt scripts/set_up.py $(wildcard csrc/*.c csrc/*.h csrc/*.py csrc/cpu/* cmake/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/set_up.py
	touch $(READY)

run: $(READY)
	$(BIN)/pyspec run

serve: $(READY)
	$(BIN)/pyspec serve $(ARGS)

# The router of tests/server/test_workers.py, which says so where it cannot be installed.
test: $(READY)
	-$(BIN)/pip install -q --retries 0 --timeout 10 sglang-router==0.3.2
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu and not real and not browser"

test-train: $(READY)
	$(BIN)/python -c "import torch" 2> /dev/null || $(BIN)/pip install -q torch==2.13.0
	$(BIN)/python -m pytest -q tests/train

cuda: $(READY)
	$(BIN)/pyspec build --cuda $(if $(ARCH),--arch "$(ARCH)")

wheel: $(READY)
	$(BIN)/pip wheel --no-deps --no-build-isolation -w dist -C portable=true $(if $(ARCH),-C "cuda=$(ARCH)") .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_reference.py --check
	$(BIN)/python scripts/make_stub.py --check
	$(BIN)/python scripts/models_table.py --check
	$(BIN)/python -m pytest -q checks

test-patches: $(READY)
	$(BIN)/python scripts/run_patched_tests.py

test-sanitized: $(READY)
	$(BIN)/python scripts/run_sanitized_tests.py --proof
	$(BIN)/python scripts/run_sanitized_tests.py

clean:
	rm -rf build dist $(READY)
