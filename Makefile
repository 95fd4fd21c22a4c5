# Two commands to know: `make pretrain` and `make test`. Both set up .venv themselves (Python >= 3.11 and pip are enough).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RECIPE ?= nano
RUN    ?= runs/$(RECIPE)
# No launcher in between: Ctrl-C and SIGTERM reach the run itself, which saves and leaves no orphan.
TRAIN  := $(BIN)/python -m earlyfusion.pipeline.pretrain
# A run that was stopped goes on; a finished one is evaluated again.
resume  = $(if $(wildcard $(1)/checkpoints/step-*),--resume)
# Options of `bench kernels` in `make gpu`: BENCH="--only kda", or --resume to go on where one was broken off.
BENCH  ?=
KIT    ?= runs/gpu-kit
KIT_PYTHON ?= 3.12
ROOMS  := kernels vision model data eval pipeline rl
export TOKENIZERS_PARALLELISM = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: pretrain pretrain-long test test-all check format gpu gpu-kit bench setup setup-dev clean

pretrain: setup            ## watch a small early-fusion model learn to see (CPU, minutes)
	$(TRAIN) $(RECIPE) --out $(RUN) $(call resume,$(RUN))

pretrain-long: setup       ## the same, longer (up to 30 minutes)
	$(TRAIN) nano-long --out runs/nano-long $(call resume,runs/nano-long)

test: setup-dev check      ## lint, types and every quick test that this machine can run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --durations 40 --durations-min 8

test-all: setup-dev check  ## the slow ones as well
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 60 --durations-min 8

check: setup-dev
	$(BIN)/ruff check $(ROOMS) tests
	$(BIN)/ruff format --check $(ROOMS) tests
	@mkdir -p .types/earlyfusion && for r in $(ROOMS); do ln -sfn ../../$$r .types/earlyfusion/$$r; done
	@ln -sfn ../../pipeline/package/__init__.py .types/earlyfusion/__init__.py
	MYPYPATH=.types $(BIN)/mypy -p earlyfusion

format: setup-dev
	$(BIN)/ruff check --fix $(ROOMS) tests
	$(BIN)/ruff format $(ROOMS) tests

gpu: setup-dev             ## correctness on a CUDA device, then benchmarks against peers; what fails does not stop the rest
	@mkdir -p runs/bench; failed=0; run() { echo "$$*"; "$$@" || { failed=1; echo "failed: $$*" >&2; }; }; \
	run $(BIN)/python -m pytest -m gpu; \
	run $(BIN)/earlyfusion bench kernels $(BENCH); \
	run $(BIN)/earlyfusion bench train; \
	run $(BIN)/earlyfusion bench engine --recipe small --batches 64,256 --steps 0 --out runs/bench/engine.json; \
	run $(BIN)/earlyfusion bench engine --recipe kimi-linear-48b --model.num_experts 16 --sides "" --out runs/bench/contexts.json; \
	exit $$failed

gpu-kit: setup-dev         ## wheels of all that `make gpu` needs, for a GPU machine with torch and without network
	$(BIN)/python -m earlyfusion.pipeline.gpu_kit --python $(KIT_PYTHON) --out $(KIT)

bench: setup
	$(BIN)/earlyfusion bench train

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash setup.sh
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	PYTHON=$(PYTHON) VENV=$(VENV) bash setup.sh dev,video,shards,eval,rewards
	@touch $@

clean:
	rm -rf $(VENV) .types .pytest_cache .mypy_cache .ruff_cache build *.egg-info
