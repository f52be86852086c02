# make run   sets everything up and runs the main job on the embedded pair
# make test  sets everything up and runs the tests
# make lint  ruff (layout and rules) and mypy
# make test-patches  builds llama.cpp with the patches and runs its tests; the build is kept in the user's cache
# Set-up needs Python 3.11 or newer, a compiler for C and C++ and CMake's build tools; everything else is Python packages. Building llama-cpp-python
# takes minutes the first time (pip keeps the wheel), and so does llama.cpp with the patches; nothing else takes more than seconds.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test lint test-patches clean
.DEFAULT_GOAL := run

$(READY): pyproject.toml CMakeLists.txt $(wildcard csrc/*.c csrc/*.h csrc/*.py)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "scikit-build-core>=0.10" "cffi>=1.17" cmake ninja "llama-cpp-python==0.3.36"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[test,lint]"
	touch $(READY)

run: $(READY)
	$(BIN)/pyspec run

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy

test-patches: $(READY)
	$(BIN)/python scripts/run_patched_tests.py

clean:
	rm -rf build dist $(READY)
