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
SECONDS ?= 60
SANITIZERS ?= thread address
# Tests wait more than they compute. A file's tests stay in one process, where they share ranks.
WORKERS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder
RESULTS := benchmarks/results

SOURCES := $(shell find compression backend sharding cpp python CMakeLists.txt setup.py pyproject.toml \
             -type f -not -path '*/__pycache__/*' -not -name '*.md' 2>/dev/null)
CXX_FILES := $(shell find compression backend sharding cpp python/bindings tests \
               -name '*.cpp' -o -name '*.h' -o -name '*.cu' 2>/dev/null)

.PHONY: help train bench bench-loss bench-nodes test fuzz soak sanitize smoke lint format build wheel venv clean
.DELETE_ON_ERROR:

help:
	@echo "make train      set up everything in $(VENV), then train a small GPT over zeropg on $(RANKS) ranks (RANKS=4)"
	@echo "                (ARGS='--compression top_k' sends gradients in few bytes, and ends with what that saved)"
	@echo "make bench      measure beside gloo, DDP, FSDP2 and torch.optim into $(RESULTS), with plots   (a quiet machine)"
	@echo "make bench-loss losses, and times to them over slow links, for each codec, on simulated hosts   (ARGS=--quick)"
	@echo "make bench-nodes collectives between simulated nodes, beside gloo and what the links carry   (ARGS=--quick)"
	@echo "make test       set up everything, then run every test      (ARGS='-k all_reduce -x' goes to pytest; WORKERS= runs one at a time)"
	@echo "make test-torch torch's own suite for backends, all of it, under our name and gloo's"
	@echo "make fuzz       libFuzzer on what parses bytes of strangers  (make fuzz SECONDS=600; half a minute of make test)"
	@echo "make soak       random programs that nobody has run, beside what they must give  (make soak SECONDS=3600: a test)"
	@echo "make sanitize   the C++ tests under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make smoke      the tests marked smoke, for other versions   (make smoke TORCH=2.11.0)"
	@echo "make lint       clang-format, ruff, mypy, conflict markers   (make format repairs the first two)"
	@echo "make build      $(BUILD): libraries, bindings and C++ tests; PYTHONPATH=$(BUILD)/python runs it uninstalled"
	@echo "make wheel      dist/zeropg-*.whl for torch $(TORCH)"
	@echo "make clean      remove build/ and dist/; the virtual environments stay"

train: $(BUILD)/installed.stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) -m zeropg train $(ARGS)

BENCH := $(BIN)/python -m zeropg bench
# A suite and the files that it writes. Together they take about a quarter of an hour.
measure = $(BENCH) $(1) $(ARGS) --output $(RESULTS)/$(2).json --plot $(RESULTS)/$(2).svg
PEERS := --peers zeropg,zeropg_arena,gloo,openmpi
SIZES := -b 1K -e 64M -f 4 --rounds 3 --turn-seconds 0.15
MOVED := all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,send_receive
TINY := -b 4 -e 8 -f 2 --iterations 2000
CROWDED := -b 1K -e 1M -f 32 --rounds 5 --iterations 300

# ARGS=--even-if-busy goes on where others use the CPUs, and marks what comes out.
bench: $(BUILD)/installed.stamp
	$(BIN)/python -m pip install -q -r requirements/bench.txt
	@mkdir -p $(RESULTS)
	$(call measure,collectives,collectives_2_ranks) -n 2 --op all $(SIZES) $(PEERS)
	$(call measure,collectives,collectives_4_ranks) -n 4 --op $(MOVED) $(SIZES) $(PEERS)
	$(call measure,collectives,collectives_8_ranks) -n 8 $(SIZES) $(PEERS)
	$(call measure,collectives,dtypes_2_ranks) -n 2 -d bfloat16,float $(SIZES) --rounds 5 --peers zeropg,zeropg_arena,gloo
	$(BENCH) collectives $(ARGS) -n 1 --op dist_all_reduce $(TINY) --output $(RESULTS)/latency_1_rank.json
	$(BENCH) collectives $(ARGS) -n 2 --op dist_all_reduce,all_reduce,send_receive $(TINY) --output $(RESULTS)/latency_2_ranks.json
	$(BENCH) collectives $(ARGS) -n 4 --beside 2 --op all_reduce,all_to_all $(CROWDED) --output $(RESULTS)/busy_4_ranks.json
	$(call measure,groups,groups_16_ranks)
	$(call measure,optimizer,optimizer_1_thread)
	$(call measure,compression,compression)
	$(call measure,offload,offload) --path build
	$(call measure,train,train_step_2_ranks) -n 2 --rounds 2
	$(BENCH) load $(ARGS) --output $(RESULTS)/load.json
	$(BENCH) table --folder $(RESULTS) > $(RESULTS)/table.md

# Root, or a kernel that lets users make namespaces; some hours on two cores (ARGS=--quick: a few minutes).
bench-loss: $(BUILD)/installed.stamp
	$(BIN)/python -m pip install -q -r requirements/bench.txt
	@mkdir -p $(RESULTS)
	$(call measure,loss,loss) --links 100mbit,1gbit

HOSTS := -n 4 --hosts 2 --link 1gbit --layers 10 --batch 1 --rounds 2 --steps 5

# Needs the same; about half an hour.
bench-nodes: $(BUILD)/installed.stamp
	$(BIN)/python -m pip install -q -r requirements/bench.txt
	@mkdir -p $(RESULTS)
	$(call measure,nodes,nodes)
	$(if $(findstring --quick,$(ARGS)),,$(BENCH) train $(HOSTS) $(ARGS) --output $(RESULTS)/train_step_2_hosts.json)
	$(BENCH) table --folder $(RESULTS) > $(RESULTS)/table.md

test: build $(BUILD)/installed.stamp
	ZEROPG_BUILD_DIR=$(BUILD) $(VENV)/bin/python -m pytest $(WORKERS) tests -m "not soak" $(ARGS)

# torch 2.11 has gloo built in under its name, which a plugin cannot take there.
test-torch: $(BUILD)/installed.stamp
	$(VENV)/bin/python -m tests.torch_suite $(ARGS)
	$(if $(filter 2.11.%,$(TORCH)),,$(VENV)/bin/python -m tests.torch_suite --impersonate gloo $(ARGS))

fuzz: $(VENV)/requirements.stamp
	ZEROPG_BUILD_DIR=$(BUILD) ZEROPG_FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest -s tests/fuzz $(ARGS)

# A failure names the seed: ZEROPG_PROGRAM_SEED=N runs that program alone.
soak: build
	ZEROPG_BUILD_DIR=$(BUILD) ZEROPG_PROGRAM_SECONDS=$(SECONDS) $(BIN)/python -m pytest -o faulthandler_timeout=0 \
	  tests -m "soak or soak_too" $(ARGS)

# ARGS='-k transport' goes to pytest; SANITIZERS=thread runs one of them. Without address randomisation, of which new
# kernels have more than ThreadSanitizer expects, and without UCX's hooks in the allocator. torch is not instrumented:
# its vectors may hide their bounds.
sanitize: $(SANITIZERS:%=sanitize-%)

sanitize-%: $(VENV)/requirements.stamp
	$(BIN)/cmake -S . -B build/sanitize-$* -G Ninja -DPython3_EXECUTABLE=$(BIN)/python -DZEROPG_SANITIZE=$*
	$(BIN)/cmake --build build/sanitize-$* --target gtests --parallel $(JOBS)
	UCX_MEM_EVENTS=n TSAN_OPTIONS=die_after_fork=0:halt_on_error=1 ASAN_OPTIONS=detect_container_overflow=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 ZEROPG_TEST_SECONDS=1800 ZEROPG_BUILD_DIR=build/sanitize-$* \
	  setarch -R $(BIN)/python -m pytest tests/test_cpp.py $(ARGS)

# Without the C++ tests, which `make test` builds for any torch.
smoke: $(BUILD)/installed.stamp
	@$(BIN)/cmake --build $(BUILD) --parallel $(JOBS) --target cpp_program
	ZEROPG_BUILD_DIR=$(BUILD) $(VENV)/bin/python -m pytest $(WORKERS) tests -m "smoke and not soak" $(ARGS)

lint: $(VENV)/requirements.stamp
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' # what a merge left behind
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
