# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# a file of tests, with its fixtures, stays in one process
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile
# those that pyproject.toml leaves out: a -m replaces its own
LONG   := not crash and not fuzz and not slow and not oracle and not fla and not engines

.DEFAULT_GOAL := help
.PHONY: help install assets demo demo-smollm2 test test-all lint types check crash mutate fla oracle engines clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)  ## make .venv and install hscache with the developers' tools

assets: $(STAMP)  ## fetch the demo's target and prompts into the user cache (once)
	@$(BIN)/python tools/demo/demo_assets.py

demo: $(STAMP)  ## prompts to an exported drafter, on the trained 7M hybrid of this repository; minutes
	@$(BIN)/python tools/demo/demo.py

demo-smollm2: assets  ## the same on SmolLM2-135M-Instruct; a thousand steps of training
	@$(BIN)/python tools/demo/demo.py smollm2

test: assets  ## the quick tests: about five minutes on two cores
	$(PYTEST) -m "not thorough and $(LONG)"

test-all: assets  ## every test but those with a target of their own; CI runs these
	$(PYTEST) --durations=20

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict on both packages
	$(BIN)/mypy

check: lint types test-all fla oracle  ## everything that CI runs

crash: assets  ## kill -9 at many moments and every file operation; about half an hour
	$(BIN)/python -m pytest -m crash
	$(BIN)/python tools/faults/crash_loop.py

mutate: $(STAMP)  ## every byte of a small store flipped, every file cut, shards moved: all must be found; an hour
	$(BIN)/python tools/faults/mutate.py

fla: assets  ## fla's real kernels through Triton's interpreter; minutes
	$(BIN)/python tools/bench/fla_env.py
	$(PYTEST) -m fla

oracle: assets  ## exports, masks and losses against dflash, speculators and vLLM, stores against tensorstore; a download once
	$(BIN)/python tools/bench/oracle_env.py
	$(PYTEST) -m oracle

engines: assets  ## llama.cpp's own server against our generation and acceptance; compiles it once, minutes
	$(BIN)/python tools/bench/llama_cpp_env.py
	$(PYTEST) -m engines

clean:  ## remove .venv and the demos' output
	rm -rf $(VENV) runs/demo runs/demo-smollm2
