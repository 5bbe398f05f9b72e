# Every target sets up what it needs by itself, given git, make and Python 3.11. `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all test-fast lint tests-of-a-change bench bench-data bench-online bench-rl bench-robot bench-service crash docs clean

BIN := .venv/bin
EXTRAS ?= dev
TEST_EXTRAS := components dev hf lightning llm ray report service sim sweep
PYTEST_ARGS ?=
# A file at a time, on both cores, in their order: the longest come first. 0 runs everything in one process.
PYTEST_WORKERS ?= 2
# How many tests that fail beside others may be tried again, alone (tests/again.py); continuous integration allows some.
AGAIN ?= 0
TRIALS ?= 200
# Minutes after which a step is ended with all that it started, and says where it was.
SETUP_LIMIT ?= 60
LINT_LIMIT ?= 15
TEST_LIMIT ?= 50

# One thread per process: OpenMP threads that spin for shared cores cost several times the work.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
# Packages are compiled when they are first imported (scripts/setup_venv.py), which must then be kept.
unexport PYTHONDONTWRITEBYTECODE

# $(call setup,extras): find a Python 3.11 that can make virtual environments, and bring .venv up to date.
define setup
@for python in $(PYTHON) python3.11 /usr/bin/python3.11 python3; do \
	if "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
		"$$python" scripts/bounded.py $(SETUP_LIMIT) scripts/system-packages.sh $(1) && \
			exec "$$python" scripts/bounded.py $(SETUP_LIMIT) "$$python" scripts/setup_venv.py $(1); \
	fi; \
done; \
echo "etude needs Python 3.11 with venv (Debian: apt-get install python3.11-venv); name one with: make PYTHON=path" >&2; \
exit 1
endef

# $(call pytest,options): run the tests. Nothing that the extras bring may be missing (tests/expected_skips.py).
define pytest
ETUDE_TEST_EXTRAS="$(TEST_EXTRAS)" $(BIN)/python scripts/bounded.py $(TEST_LIMIT) \
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -p tests.again --again $(AGAIN) $(1) $(PYTEST_ARGS)
endef

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

setup:  ## Install into .venv at the versions of requirements.lock (EXTRAS="dev hf")
	$(call setup,$(EXTRAS))

quickstart:  ## Record a robot, train a policy on it, evaluate it in simulation, write a report with videos
	$(call setup,quickstart sim)
	$(BIN)/etude quickstart

test:  ## Lint and run the tests
	$(call setup,$(TEST_EXTRAS))
	@$(MAKE) --no-print-directory -j2 lint tests-of-a-change

# Beside lint, whose types take one core for most of a minute; make fails when either does.
tests-of-a-change:
	$(call pytest,--no-loadscope-reorder -m "not nightly")

test-all:  ## Run every test, also those that take too long for each change
	@$(MAKE) --no-print-directory test TEST_LIMIT=360 PYTEST_ARGS='-m "" $(PYTEST_ARGS)'

test-fast:  ## Run the tests that take no time (under 3 minutes in all)
	$(call setup,$(TEST_EXTRAS))
	$(call pytest,-m "not slow")

lint:  ## Check style and types
	$(call setup,dev)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/bounded.py $(LINT_LIMIT) $(BIN)/mypy

bench:  ## Measure against a bare PyTorch loop and the peers, side by side
	$(call setup,dev hf lightning ray sim)
	$(BIN)/python -m benchmarks

bench-data:  ## Measure loading of robot data, beside lerobot's where ETUDE_LEROBOT_PYTHON names a Python that has it
	$(call setup,dev sim)
	$(BIN)/python -m benchmarks.lerobot_data

bench-robot:  ## Learn from demonstrations and print success rates (hours; started again, it goes on)
	$(call setup,dev sim)
	$(BIN)/python -m benchmarks.robot --suite full

bench-online:  ## Learn from 5 demonstrations while acting and print success rates (an hour; started again, it goes on)
	$(call setup,dev sim)
	$(BIN)/python -m benchmarks.online
	$(BIN)/python -m benchmarks.rlpd

bench-rl:  ## Learn from rewards and print curves and costs, beside TRL's where ETUDE_TRL_PYTHON names a Python that has it
	$(call setup,dev llm)
	$(BIN)/python -m benchmarks.rl

bench-service:  ## Measure the training service, beside those that ETUDE_SKYRL_PYTHON and ETUDE_HATCHERY_PYTHON have
	$(call setup,dev llm service)
	$(BIN)/python -m benchmarks.service

crash:  ## Kill training at 200 random instants and count the exact resumes
	$(call setup,dev)
	$(BIN)/python -m tests.crash --trials $(TRIALS)

docs:  ## Build the documentation into site/; pictures that are missing are made from real runs
	$(call setup,dev llm sim sweep)
	$(BIN)/python -m scripts.pictures
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove caches and built files; runs and .venv stay
	rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
