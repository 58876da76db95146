# Set-up and every task of this repository. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo serve lint format check test bench golden proto proto-check lock wheel-test

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

export PYTHONUNBUFFERED := 1

help:  ## this list
	@echo "pdserve: prefill and decode in pools of their own. Each task installs what it needs first."
	@echo
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "  make %-12s%s\n", $$1, $$2 }' Makefile
	@echo
	@echo "ARGS reaches the program:  make test ARGS='tests/wire -k token'    make serve ARGS='--port 9000'"

install: $(INSTALLED)  ## .venv with the pinned packages, and the bundled model (once)

# Runs again only when the pins or the project's metadata change.
$(INSTALLED): requirements.lock pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or later: make PYTHON=...")'
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing $$(grep -c == requirements.lock) pinned packages into $(VENV) (a minute or two)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.lock \
	  2> >(grep -v ^WARNING >&2) \
	  | awk '/^Collecting/ { print "  " $$2; fflush() } /^Installing/ { print "unpacking them (torch is large)"; fflush() }'
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pdserve.models >/dev/null
	@touch $@

demo: $(INSTALLED)  ## a router, a prefill and a decode worker; a few requests; what happened
	@$(BIN)/python -m pdserve.demo $(ARGS)

serve: $(INSTALLED)  ## an OpenAI-compatible server on this machine
	@$(BIN)/pdserve serve $(ARGS)

lint: $(INSTALLED)  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "not in ruff's format: 'make format' mends it"; exit 1; }

format: $(INSTALLED)  ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

check: $(INSTALLED)  ## mypy, strict
	@$(BIN)/mypy

test: $(INSTALLED)  ## all tests but those marked slow
	@$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

bench: $(INSTALLED)  ## measurements (see benchmarks/)
	@$(BIN)/python -m benchmarks $(ARGS)

golden: $(INSTALLED)  ## write the committed golden outputs anew
	@$(BIN)/python -m tests.golden $(ARGS)

proto: $(INSTALLED)  ## generate proto/pdserve_pb/*_pb2* from the .proto files
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto \
	  proto/pdserve_pb/*.proto

proto-check: $(INSTALLED)  ## are the generated modules those of the .proto files?
	@$(BIN)/pytest -q tests/test_proto.py

# The newest releases that pyproject.toml allows. torch stays: another release is a decision.
lock:  ## resolve pyproject.toml anew and write requirements.lock
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	"$(PYTHON)" -m venv "$$work/venv"; \
	"$$work/venv/bin/python" -m pip install --progress-bar off "$$(grep ^torch== requirements.lock)" '.[dev]'; \
	{ sed -n '/^#/p' requirements.lock; \
	  "$$work/venv/bin/python" -m pip freeze --all --exclude pip --exclude pdserve | sed 's/+cpu$$//'; } > "$$work/lock"; \
	cp "$$work/lock" requirements.lock

wheel-test: $(INSTALLED)  ## build the wheel, install it into an empty venv, ask it a question
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	rm -rf build; \
	$(BIN)/python -m build --wheel --no-isolation --outdir "$$work" . >"$$work/log" || { cat "$$work/log"; exit 1; }; \
	"$(PYTHON)" -m venv "$$work/venv"; \
	echo "installing $$(cd "$$work"; echo *.whl) into an empty venv (a minute or two)"; \
	"$$work/venv/bin/python" -m pip install --disable-pip-version-check --quiet -c requirements.lock "$$work"/*.whl; \
	cd /; answer=$$("$$work/venv/bin/pdserve" run "What is the capital of France?"); \
	echo "$$answer"; grep -q Paris <<<"$$answer"
