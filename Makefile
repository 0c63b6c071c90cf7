# Lily's commands; `make help` lists them. All but `make toolchain` install into $(VENV) and nowhere else.
#   PYTHON=python3.12 make test     with another interpreter
#   make test ARGS="-k loading"     with arguments for pytest
PYTHON ?= $(shell tools/check.sh python)
VENV ?= .venv
ARGS ?=
# Settings of the native build, in pip's spelling; `make sanitize` sets them.
SETTINGS ?=
# How long `make sanitize-threads` runs.
SECONDS ?= 150

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE \
	$(shell find csrc src/lily metal tools/metal/language -type f ! -name '*.pyc' ! -name '*.so')
SANITIZED := build/sanitized
SANITIZE := --config-settings=build-dir=build/sanitized-{wheel_tag} --config-settings=cmake.define.LILY_SANITIZE=ON \
	--config-settings=cmake.define.LILY_PTX=OFF

# Long tests that look at a clock or at memory, and so run alone.
LOAD := tests/test_server_load.py tests/test_server_malformed.py tests/test_soak.py tests/test_limits.py

.PHONY: help demo test test-long sanitize sanitize-threads toolchain kernels ptx lint format stubs docs clean FORCE
.DEFAULT_GOAL := help

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s  %s\n", $$1, $$2}' Makefile

demo: $(VENV)/installed  ## build, install, and write a story with the embedded checkpoint
	$(VENV)/bin/lily generate "Tell me a story about a fox." --seed 58

test: $(VENV)/extra-test  ## build, install, and run the default suite: at most 10 minutes on two cores
	@$(PY) tests/rungs.py
	$(PY) -m pytest -n auto --dist loadfile $(ARGS)

test-long: $(VENV)/extra-test  ## load, fuzz and sanitizers: at most 45 minutes on two cores
	$(PY) -m pytest -m "long or hypothesis" --hypothesis-profile=long -n auto $(LOAD:%=--ignore=%) $(ARGS)
	$(PY) -m pytest -m "long or hypothesis" --hypothesis-profile=long $(LOAD) $(ARGS)
	@$(MAKE) sanitize
	@$(MAKE) sanitize-threads

sanitize:  ## the core's tests with the address and undefined-behaviour sanitizers (Linux)
	@$(MAKE) VENV=$(SANITIZED) SETTINGS="$(SANITIZE)" $(SANITIZED)/extra-test
	tools/sanitize.sh $(SANITIZED)/bin/python $(ARGS)

sanitize-threads: $(VENV)/extra-test  ## eight threads on one session under the thread sanitizer, for SECONDS (Linux)
	tools/sanitize_threads.sh $(VENV)/bin/cmake $(SECONDS)

toolchain:  ## install the compilers and emulators of the Linux rungs (asks apt; needs root)
	tools/toolchain.sh

kernels: $(VENV)/extra-test  ## compile the GPU kernels for the simulator into build/kernels.so (needs the toolchain)
	$(PY) -m tools.metal.compile metal/*.metal -o build/kernels.so

lint: $(VENV)/extra-dev  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/extra-dev  ## ruff's and clang-format's layout, in place
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(shell find bench csrc tests tools -name '*.h' -o -name '*.cpp' -o -name '*.mm')

ptx: $(VENV)/extra-test  ## compile the GPU kernels for NVIDIA GPUs into build/kernels.ptx (needs the toolchain)
	$(PY) -m tools.metal.cuda metal/*.metal -o build/kernels.ptx

stubs: $(VENV)/extra-test  ## regenerate what is committed but made from the core: _core.pyi and docs/options.md
	$(PY) tools/generate.py

docs: $(VENV)/extra-docs  ## build the documentation into site/
	$(VENV)/bin/mkdocs build --strict

clean:  ## remove everything that these commands made
	$(RM) -r .venv build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache

# The virtual environment, made anew when another interpreter is asked for.
$(VENV)/interpreter: FORCE
	@tools/check.sh venv "$(PYTHON)" "$(VENV)"

# What pip would put into a fresh environment for every build. Here it stays, and with it CMake's cache is good for the
# next build, which then compiles only what changed.
$(VENV)/build-requires: pyproject.toml $(VENV)/interpreter
	$(PY) -c 'import tomllib; print(*tomllib.load(open("$<", "rb"))["build-system"]["requires"], sep="\n")' > $@.txt
	$(PIP) install --quiet -r $@.txt "cmake>=3.26" ninja
	@touch $@

# The wheel that users get.
$(VENV)/wheel/built: $(VENV)/build-requires $(SOURCES)
	@$(RM) -r $(VENV)/wheel
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(VENV)/wheel $(SETTINGS) .
	@touch $@

$(VENV)/installed: $(VENV)/wheel/built
	$(PIP) install --quiet --no-deps --force-reinstall $(VENV)/wheel/*.whl
	$(PIP) install --quiet $(VENV)/wheel/*.whl
	@touch $@

$(VENV)/extra-%: $(VENV)/installed
	$(PIP) install --quiet "$$(echo $(VENV)/wheel/*.whl)[$*]"
	@touch $@
