# Index of the commands; `make help` lists them. A second run installs nothing unless its inputs changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled as they are loaded: most never are. Where nothing is written then, pip compiles all of them.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) --constraint constraints.txt --editable
# What pip prints is shown only where it fails.
QUIETLY := > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
TRANSFORMERS := 5.16.0 5.24.0
ADAPTER_TESTS := tests/models/test_adapter.py tests/models/test_parity.py tests/conformance/test_adapter.py tests/llm/test_transformers.py tests/drafters/test_layer_skip.py
COMPILED := src/parlay/compiled
# One process more than there are cores: tests wait for servers and for other processes a fifth of their time.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
comma := ,
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
MLX := mlx-lm$(if $(filter Linux,$(shell uname)),[cpu])

.PHONY: help demo check types tests check-browser check-versions check-arm check-mlx sanitize check-gpu conformance proof bench-smoke bench-figures docs wheel release clean

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

demo: $(VENV)/.runtime  ## install, fetch a small real model (98 MB), then race plain against fast, side by side
	@$(BIN)/parlay demo

check: $(VENV)/.dev  ## install development extras, then lint, format, strict types, all tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs 2 types tests
	@test -e "$${XDG_CACHE_HOME:-$$HOME/.cache}/parlay/models/smollm2-135m" || echo 'The tests on SmolLM2 were skipped: it is not in the cache (make demo fetches it).'
	@command -v chromium >/dev/null || echo 'The tests of the page were skipped: there is no Chromium here (make check-browser installs it).'

types: $(VENV)/.dev  ## strict types alone
	$(BIN)/mypy

tests: $(VENV)/.dev  ## the tests alone
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal  # else each process compiles all modules anew

check-browser: $(VENV)/.dev  ## the tests of the server's page, in Chromium; installs Debian's where there is none
	command -v chromium >/dev/null || $(AS_ROOT) sh -c 'apt-get update && apt-get install --yes chromium'
	$(BIN)/pytest tests/serve/page

check-versions: $(VENV)/.dev  ## the adapter's tests with the oldest and newest transformers allowed; TORCH="2.8.0 2.15.0" adds those of torch
	@for package in $(addprefix transformers==,$(TRANSFORMERS)) $(addprefix torch==,$(TORCH)); do \
		folder=build/versions/$$package && echo "testing the adapter with $$package" && \
		{ test -e $$folder/.installed || { $(BIN)/pip install --disable-pip-version-check --quiet --target $$folder $$package && touch $$folder/.installed; }; } && \
		PYTHONPATH=$$folder $(BIN)/pytest $(ADAPTER_TESTS) || exit 1; \
	done

check-arm: $(VENV)/.dev  ## the compiled decoder's products on AArch64, by an emulator; installs Debian's and a cross compiler
	command -v qemu-aarch64 aarch64-linux-gnu-gcc >/dev/null || $(AS_ROOT) sh -c 'apt-get update && apt-get install --yes qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross'
	$(BIN)/pytest tests/models/test_arm.py

check-mlx: $(VENV)/.dev  ## the tests of the runner mlx, with mlx-lm installed into a folder of its own
	@folder=build/mlx && { test -e $$folder/.installed || { $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt --target $$folder $(MLX) && touch $$folder/.installed; }; } && \
		PYTHONPATH=$$folder $(BIN)/pytest tests/models/test_mlx.py

sanitize: $(VENV)/.dev  ## tests of the C library with AddressSanitizer and UBSan, then of its threads with ThreadSanitizer; PARLAY_COMPILED=avx2 for another instruction set
	$(BIN)/python -m tests.sanitize memory
	$(BIN)/python -m tests.sanitize threads

check-gpu: $(VENV)/.dev  ## kernels, conformance and speeds on this machine's GPU in ten minutes, as a page to send back; MODEL=NAME for another model, DATA=DIR for the 16 kinds of question
	@$(BIN)/python -m benchmarks.gpu $(if $(MODEL),--model "$(MODEL)") $(if $(DATA),--data "$(DATA)")

conformance: $(VENV)/.dev  ## the long form of the conformance kit: every strategy, more tokens, more draws
	$(BIN)/pytest -m slow
	$(BIN)/python -m parlay.testing.conformance --long --processes 2 --write docs/developers/conformance.md

proof: $(VENV)/.dev  ## the server's proofs at length (20 minutes on two idle cores): schemathesis, hostile bodies; how to run others
	$(BIN)/pytest -m slow tests/serve
	@echo 'By programs that want environments of their own (benchmarks/README.md says how to make them):'
	@echo "  $(BIN)/python -m benchmarks.serving.lm_eval_run --lm-eval EXECUTABLE   # lm-eval's scores, plain and default"
	@echo "  $(BIN)/python -m benchmarks.serving.load --vllm PYTHON                 # vLLM's load generator"

bench-smoke: $(VENV)/.dev  ## speeds against plain decoding, held against lower bounds; under 3 minutes on an idle machine
	$(BIN)/python -m benchmarks.smoke

bench-figures: $(VENV)/.dev  ## measure launch, the engine's own work and adversaries; DATA=DIR for all of it, else a quick look
	$(BIN)/python -m benchmarks.figures $(if $(DATA),--data "$(DATA)",--quick)

docs: $(VENV)/.docs  ## the documents as a site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet --site-dir build/site

wheel: $(VENV)/.runtime  ## a wheel with the compiled decoder for this kind of machine, in dist/
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

release: $(VENV)/.release docs  ## build and check all that would be uploaded: source archive, wheel, documents
	rm -rf dist build/sdist build/fresh
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	@for made in dist/*.whl dist/*.tar.gz; do \
		echo "installing $$made into an empty environment, and running it" && \
		$(PYTHON) -m venv --clear build/fresh && \
		build/fresh/bin/pip install --disable-pip-version-check --quiet --constraint constraints.txt "$$made" && \
		(cd build && fresh/bin/parlay generate 'Once upon a time' --model parlay-mini --max-tokens 8) && \
		(cd build && fresh/bin/python -c 'from parlay.compiled.library import load; print("compiled decoder:", load().name.decode())') || exit 1; \
	done
	@ls -l dist && echo 'The source archive may be uploaded. This wheel is for machines like this one; an index takes those of .github/workflows/wheels.yml'

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.runtime $(VENV)/.dev: pyproject.toml constraints.txt hatch_build.py $(COMPILED)/build.py $(wildcard $(COMPILED)/core/*)
	@$(PYTHON) -c 'import sys; sys.exit("parlay needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo 'installing Parlay and its packages into $(VENV) (about 2 minutes the first time)...'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PYTHON) $(COMPILED)/build.py --if-changed & HATCH_BUILD_NO_HOOKS=true $(INSTALL) '.[serve$(if $(filter %.dev,$@),$(comma)dev)]' $(QUIETLY) && wait
	@touch $(VENV)/.runtime $@

$(VENV)/.release: $(VENV)/.runtime
	@echo 'installing what a release needs...'
	@$(INSTALL) '.[release]' $(QUIETLY)
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	@echo 'installing what the site of the documents needs...'
	@$(INSTALL) '.[docs]' $(QUIETLY)
	@touch $@
