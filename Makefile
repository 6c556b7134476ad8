# `make` says what there is. TORCH=2.11.0 chooses another torch, with its own .venv-2.11.0 and build/torch-2.11.0.
PYTHON ?= python3
# torch 2.15 needs Python 3.11.
DEFAULT_TORCH := $(shell $(PYTHON) -c 'import sys; print("2.15.0" if sys.version_info >= (3, 11) else "2.11.0")')
TORCH ?= $(DEFAULT_TORCH)
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
BUILD := build/torch-$(TORCH)
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
JOBS := $(shell nproc)
RANKS ?= 2
RESULTS := benchmarks/results

SOURCES := $(shell find compression backend sharding cpp python CMakeLists.txt setup.py pyproject.toml \
             -type f -not -path '*/__pycache__/*' -not -name '*.md' 2>/dev/null)
CXX_FILES := $(shell find compression backend sharding cpp python/bindings tests \
               -name '*.cpp' -o -name '*.h' -o -name '*.cu' 2>/dev/null)

.PHONY: help train bench test smoke lint format build wheel venv clean
.DELETE_ON_ERROR:

help:
	@echo "make train      set up everything in $(VENV), then train a small GPT over zeropg on $(RANKS) ranks (RANKS=4)"
	@echo "make bench      measure beside gloo, DDP, FSDP2 and torch.optim into $(RESULTS), with plots   (a quiet machine)"
	@echo "make test       set up everything, then run every test      (ARGS='-k all_reduce -x' goes to pytest)"
	@echo "make test-torch torch's own suite for backends, all of it, under our name and gloo's"
	@echo "make smoke      the tests marked smoke, for other versions   (make smoke TORCH=2.11.0)"
	@echo "make lint       clang-format, ruff, mypy                     (make format repairs the first two)"
	@echo "make build      $(BUILD): libraries, bindings and C++ tests; PYTHONPATH=$(BUILD)/python runs it uninstalled"
	@echo "make wheel      dist/zeropg-*.whl for torch $(TORCH)"
	@echo "make clean      remove build/ and dist/; the virtual environments stay"

train: $(BUILD)/installed.stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) -m zeropg train $(ARGS)

# ARGS=--even-if-busy goes on where others use the CPUs, and marks what comes out.
bench: $(BUILD)/installed.stamp
	$(BIN)/python -m pip install -q -r requirements/bench.txt
	@mkdir -p $(RESULTS)
	$(BIN)/python -m zeropg bench collectives -n $(RANKS) --op all $(ARGS) \
	  --output $(RESULTS)/collectives_$(RANKS)_ranks.json --plot $(RESULTS)/collectives_$(RANKS)_ranks.svg
	$(BIN)/python -m zeropg bench optimizer $(ARGS) \
	  --output $(RESULTS)/optimizer_1_thread.json --plot $(RESULTS)/optimizer_1_thread.svg
	$(BIN)/python -m zeropg bench compression $(ARGS) \
	  --output $(RESULTS)/compression.json --plot $(RESULTS)/compression.svg
	$(BIN)/python -m zeropg bench offload --path build $(ARGS) \
	  --output $(RESULTS)/offload.json --plot $(RESULTS)/offload.svg
	$(BIN)/python -m zeropg bench train -n $(RANKS) $(ARGS) \
	  --output $(RESULTS)/train_step_$(RANKS)_ranks.json --plot $(RESULTS)/train_step_$(RANKS)_ranks.svg

test: build $(BUILD)/installed.stamp
	ZEROPG_BUILD_DIR=$(BUILD) $(VENV)/bin/python -m pytest tests $(ARGS)

# torch 2.11 has gloo built in under its name, which a plugin cannot take there.
test-torch: $(BUILD)/installed.stamp
	$(VENV)/bin/python -m tests.torch_suite $(ARGS)
	$(if $(filter 2.11.%,$(TORCH)),,$(VENV)/bin/python -m tests.torch_suite --impersonate gloo $(ARGS))

smoke: build $(BUILD)/installed.stamp
	ZEROPG_BUILD_DIR=$(BUILD) $(VENV)/bin/python -m pytest tests -m smoke $(ARGS)

lint: $(VENV)/requirements.stamp
	@$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/requirements.stamp
	@$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Everything, the C++ tests too; ninja decides what is out of date.
build: $(BUILD)/installed.stamp
	@$(BIN)/cmake --build $(BUILD) --parallel $(JOBS)

wheel: $(BUILD)/wheel.stamp
	@ls dist/zeropg-*.whl

# The wheel, and not an editable installation: what is tested is what a user gets, RUNPATH included.
$(BUILD)/installed.stamp: $(BUILD)/wheel.stamp
	$(BIN)/python -m pip install -q --no-deps --force-reinstall "$$(cat $(BUILD)/wheel.stamp)"
	@touch $@

$(BUILD)/wheel.stamp: $(SOURCES) $(VENV)/requirements.stamp build/debian.stamp
	@mkdir -p $(BUILD) dist
	rm -rf $(BUILD)/wheel
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w $(BUILD)/wheel .
	@cp $(BUILD)/wheel/*.whl dist/ && ls $(CURDIR)/$(BUILD)/wheel/*.whl > $@

venv: $(VENV)/requirements.stamp

$(VENV)/requirements.stamp: requirements/build.txt requirements/test.txt | build/debian.stamp
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "zeropg needs Python 3.10 or newer (PYTHON=...)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==$(TORCH) -r requirements/build.txt -r requirements/test.txt
	@touch $@

build/debian.stamp: requirements/debian.txt requirements/debian.sh
	@sh requirements/debian.sh $(PYTHON)
	@mkdir -p build && touch $@

clean:
	rm -rf build dist
