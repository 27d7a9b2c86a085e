# `make run` and `make test` are all that a newcomer needs; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# Environments are installed uncompiled: the first process that imports a module keeps what it compiled. A shell or
# an image that forbids that would have every process compile torch and transformers anew, for 12 of 20 s.
unexport PYTHONDONTWRITEBYTECODE

# PYTHON=python3.12            which interpreter makes the environment (3.11 to 3.13)
# TORCH_INDEX=URL              another index for torch, e.g. PyTorch's own one of CPU builds
# MODEL=DIR TABLE=FILE         what `make run` serves instead of the tiny model
# ADDRESS=127.0.0.1:8000       where the gateway listens; also INFERENCE_ADDRESS and DAEMON_ADDRESS
# JOBS=3                       how many processes test at once
# STACK='--cpu'                 options of `make up` and `make down`: --cpu, --gpu, --env-file FILE
# SOAK='--seed 7'              options of `make soak` and `make soak-gateway`: this seed repeats the choices of an earlier run
# OLD=0.33.0 NEW=VERSION       the releases of vLLM, or wheels, that `make vllm-diff` compares
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(if $(shell $(p) -c 'import sys; print(3.11 <= float("%d.%d" % sys.version_info[:2]) <= 3.13)' 2>/dev/null | grep True),$(p))))
TORCH_INDEX ?=
MODEL ?= var/models/triplex-tiny
TABLE ?=
ADDRESS ?= 127.0.0.1:8000
INFERENCE_ADDRESS ?= 127.0.0.1:8100
DAEMON_ADDRESS ?= 127.0.0.1:8200
JOBS ?= 3
SOAK ?=
STACK ?=

VLLM := 0.33.0
VLLM_WHEEL := var/wheels/vllm-$(VLLM)-cp38-abi3-manylinux_2_28_x86_64.whl

VENV := .venv
BIN := $(VENV)/bin
PROJECTS := protos services/ple_daemon services/inference services/gateway
READY := $(VENV)/ready
PROTOS := $(wildcard protos/ple_rpc/table/v1/*.proto)

.PHONY: help setup run serve up down test compiled test-containers restarts-doc soak soak-gateway check audit format protos protos-check overrides-doc vllm-diff bench bench-litellm lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## make the virtual environment

$(READY): constraints/cpu.txt pyproject.toml $(PROJECTS:%=%/pyproject.toml)
	@if [ -z "$(PYTHON)" ]; then
	  echo "make: no Python 3.11, 3.12 or 3.13 found: install one (Debian: apt-get install python3 python3-venv) or name it with PYTHON=..." >&2; exit 1
	fi
	if ! $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
	  echo "make: $(PYTHON) cannot be run or is no Python 3.11 to 3.13: name another with PYTHON=..." >&2; exit 1
	fi
	if ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then
	  echo "make: $(PYTHON) has no venv module: install it (Debian: apt-get install python3-venv)" >&2; exit 1
	fi
	rm -f $(READY)
	echo "make: installing the locked dependencies into $(VENV) (a few minutes the first time, and 2 to 6 GB)"
	$(PYTHON) -m venv $(VENV)
	pip="$(BIN)/python -m pip --disable-pip-version-check"
	$$pip install --quiet 'pip==26.3'
	if [ -n "$(TORCH_INDEX)" ]; then $$pip install --quiet --index-url '$(TORCH_INDEX)' 'torch==2.13.0'; fi
	$$pip install --quiet --progress-bar off --no-compile -c constraints/cpu.txt --group dev \
	  -e protos -e services/ple_daemon -e 'services/inference[reference]' -e services/gateway
	touch $(READY)

var/models/triplex-tiny/config.json: $(READY)
	@$(BIN)/python -m ple_inference tiny var/models/triplex-tiny

# The tiny model is made only when nothing else was asked for.
run: $(READY) $(if $(filter var/models/triplex-tiny,$(MODEL)),var/models/triplex-tiny/config.json) ## start the three services and chat
	@exec $(BIN)/python deploy/local/run.py --model '$(MODEL)' $(if $(TABLE),--table '$(TABLE)') --gateway-address '$(ADDRESS)' --inference-address '$(INFERENCE_ADDRESS)' --daemon-address '$(DAEMON_ADDRESS)'

serve: run ## the same as run

TEST_NEEDS := $(VLLM_WHEEL) var/vllm-planner/ready var/node/ready var/schemathesis-venv/ready

test: $(READY) ## all that CI tests without root: checks, then tests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check compiled $(TEST_NEEDS)
	$(BIN)/python -m pytest -n $(JOBS)

# What each of the processes that test would compile at the same time is compiled once, beside mypy: modules by
# collecting all tests, kernels by one of them, which starts a daemon.
compiled: $(READY)
	@said=$$($(BIN)/python -m pytest -qq -k test_socket_and_folder_are_private 2>&1) || { echo "$$said"; exit 1; }

up: ## start the three services in containers; the tiny model where there is no GPU
	@python3 deploy/stack.py up $(STACK)

down: ## stop the containers of `make up`; models and keys stay
	@python3 deploy/stack.py down $(STACK)

# Debian 12 and root; no image registry is asked. Engine, containers and images go with the command.
CONTAINERS ?=
define in_containers
if [ "$$(id -u)" != 0 ]; then echo "make: $@ installs and starts a container engine: run it as root" >&2; exit 77; fi
python3 deploy/ci/engine.py $(CONTAINERS) --prepare & prepared=$$!
$(BIN)/python deploy/ci/wheels.py
wait $$prepared
export PIP_NO_INDEX=1 TRIPLEX_CONTAINERS=1
python3 deploy/ci/engine.py $(CONTAINERS) bash -eu -c "docker compose -f deploy/compose.cpu.yaml build --quiet; $(1)"
endef

test-containers: $(READY) ## build the CPU images and test deploy/compose.cpu.yaml in a container engine of its own
	@$(call in_containers,$(BIN)/python -m pytest -n 2 -v --durations 12 tests/containers)

restarts-doc: $(READY) ## write docs/restarts.md from what the restart matrix sees
	@export TRIPLEX_RESTARTS_DOC=docs/restarts.md
	$(call in_containers,$(BIN)/python -m pytest -n 0 -v tests/containers/test_2_restarts.py)

soak: $(READY) ## kill the daemon and its clients 50 times each; some five minutes
	@$(BIN)/python tests/ple_daemon/soak.py $(SOAK)

soak-gateway: $(READY) var/schemathesis-venv/ready ## send the gateway what nobody should, for five minutes
	@$(BIN)/python tests/gateway/soak.py $(SOAK)

check: $(READY) ## lint, types, import borders, generated code; never edits
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory protos-check

# Findings fail; a machine that cannot reach the index gets a word and success.
audit: $(READY) ## look for known vulnerabilities in the locked dependencies
	@if [ ! -x var/audit-venv/bin/pip-audit ]; then
	  if ! { $(call tool_venv,var/audit-venv,constraints/audit.txt); } 2> /dev/null; then
	    echo "make: audit skipped: pip-audit cannot be installed, is there a network?"; rm -rf var/audit-venv; exit 0
	  fi
	fi
	if report=$$(var/audit-venv/bin/pip-audit --no-deps --disable-pip --progress-spinner off --timeout 15 -r constraints/cpu.txt 2> var/audit.log); then
	  echo "make: audit: no known vulnerabilities"
	elif [ -n "$$report" ]; then
	  echo "$$report"; exit 1
	else
	  echo "make: audit skipped: $$(tail -n 1 var/audit.log | cut -c 1-200)"
	fi

format: $(READY) ## what check would complain of and a tool can mend
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An environment of its own for a tool, filled by the large one's pip, so that it needs none.
tool_venv = $(BIN)/python -m venv --clear --without-pip $(1); $(BIN)/python -m pip --disable-pip-version-check \
  --python $(1)/bin/python install --quiet --progress-bar off --no-compile -r $(2)

# The oldest generator that vLLM's protobuf bounds admit; its code runs under every newer runtime.
var/protos-venv/ready: constraints/protos.txt | $(READY)
	@$(call tool_venv,$(@D),$<)
	touch $@

define generate_protos
var/protos-venv/bin/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)
endef

protos: var/protos-venv/ready ## regenerate the gRPC code
	@$(call generate_protos,protos/python)

protos-check: var/protos-venv/ready ## fail when the committed gRPC code is not what protos/ gives
	@rm -rf var/protos-check && mkdir -p var/protos-check
	$(call generate_protos,var/protos-check)
	diff -r -x __pycache__ var/protos-check/ple_rpc/table/v1 protos/python/ple_rpc/table/v1 || { echo "make: the generated code is stale: run 'make protos' and commit" >&2; exit 1; }

# The contract tests read vLLM's source text out of its wheel; nothing here installs or runs it. Any machine reads
# the same wheel, whatever its own platform.
pip_download = $(BIN)/python -m pip --disable-pip-version-check download --quiet --progress-bar off --no-deps \
  --only-binary=:all: --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64

$(VLLM_WHEEL): constraints/vllm-wheel.txt | $(READY)
	@echo "make: fetching vLLM's wheel to read its source (340 MB, once)"
	$(pip_download) --require-hashes --dest $(@D) -r $<
	touch $@

# Tests of `ple-inference plan` call vLLM's KV cache planner, which needs its Python files and no GPU. They are kept
# apart from the environment, whose versions vLLM's pins exclude.
var/vllm-planner/ready: constraints/vllm-planner.txt constraints/vllm.txt $(VLLM_WHEEL) | $(READY)
	@rm -rf $(@D)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-compile --no-deps \
	  --target $(@D) -r $<
	$(BIN)/python -c "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
	  wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.endswith('.py') or '.dist-info/' in n])" $(VLLM_WHEEL) $(@D)
	touch $@

# Kept apart from the environment: it wants an older jsonschema-rs than the gateway's.
var/schemathesis-venv/ready: constraints/schemathesis.txt | $(READY)
	@$(call tool_venv,$(@D),$<)
	touch $@

# Clients on Node that tests let talk to the gateway. A machine without Node skips those tests. Not `npm ci`: it
# wants optional packages of every platform in the lock, also those that a registry does not have.
NODE_LOCK := tests/gateway/node/package.json tests/gateway/node/package-lock.json
var/node/ready: $(NODE_LOCK)
	@if ! command -v npm >/dev/null || ! node -e 'process.exit(Number(parseInt(process.versions.node) < 20))' 2>/dev/null; then
	  echo "make: no Node 20 or newer with npm found: tests of clients on Node are skipped"; exit 0
	fi
	mkdir -p $(@D)
	cp $(NODE_LOCK) $(@D)
	cd $(@D) && npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional
	touch ready

overrides-doc: $(READY) ## write docs/overrides.md from the records
	@$(BIN)/python -m ple_inference.vllm_plugin docs > docs/overrides.md

OLD ?= $(VLLM)
NEW ?=
vllm-diff: $(READY) ## what changed from OLD to NEW in the parts of vLLM that we override
	@if [ -z "$(NEW)" ]; then echo "make: name the other release: make vllm-diff OLD=$(VLLM) NEW=VERSION (or a wheel)" >&2; exit 1; fi
	wheel() { # the wheel of a release, fetched once; a file or folder is itself
	  if [ ! -e "$$1" ]; then
	    if ! compgen -G "var/wheels/vllm-$$1-*.whl" > /dev/null; then $(pip_download) --dest var/wheels "vllm==$$1" >&2; fi
	    compgen -G "var/wheels/vllm-$$1-*.whl"
	  else echo "$$1"; fi
	}
	old=$$(wheel '$(OLD)'); new=$$(wheel '$(NEW)')
	$(BIN)/python -m ple_inference.vllm_plugin diff "$$old" "$$new"

bench: $(READY) var/models/triplex-tiny/config.json ## print the ratios that the docs quote
	@$(BIN)/python bench/daemon_bench.py
	$(BIN)/python bench/shm_bench.py
	$(BIN)/python bench/gateway_bench.py

# Kept apart from the environment, whose versions its pins exclude.
var/litellm/bin/litellm: constraints/litellm.txt | $(READY)
	@$(call tool_venv,var/litellm,$<)
	touch $@

bench-litellm: $(READY) var/litellm/bin/litellm ## the gateway's ratios with LiteLLM's proxy beside it
	@$(BIN)/python bench/gateway_bench.py --litellm var/litellm/bin/litellm

lock: $(READY) ## write both constraints files anew from the newest versions that the projects admit
	@$(BIN)/python -m venv --clear var/lock-venv
	var/lock-venv/bin/python -m pip --disable-pip-version-check install --quiet 'uv==0.13.9'
	var/lock-venv/bin/python constraints/lock.py

clean: ## remove the environment and all data made here
	@rm -rf $(VENV) var .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
