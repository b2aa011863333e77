# make run      the whole chain on a small real dataset: profile, plan, train, analyze
# make test     the test suite (under 10 minutes on 2 cores)
# make test-oldest  what touches torch, against the oldest version of it that serves, in an environment of its own
# make test-slow  the full matrices, the chain as a user runs it, and the fault tests (SHARE=2/4: their second quarter;
#                MINUTES=30: what has not started by then is skipped and counted)
# make test-all everything: also long runs of the benchmarks, and what needs cores of its own
# make bench    the quick benchmarks (about 5 minutes; see benchmarks/README.md)
# make check    ruff, mypy, import rules, docs completeness
# make docs     write docs/api.md, docs/cli.md, docs/runfile.md and docs/schema/ again

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt
OLDEST := .venv-oldest
OLDEST_TORCH := 2.11.0
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
SHARE := 1/1
MINUTES := 600
export OMP_NUM_THREADS ?= 1

.PHONY: run test test-slow test-oldest test-all bench check docs clean

run: $(VENV)/.demo
	$(BIN)/disttrain init demo --preset tiny --sample-data
	cd demo && $(BIN)/disttrain profile && $(BIN)/disttrain plan --strategy disaggregated && $(BIN)/disttrain train --restart && $(BIN)/disttrain analyze

test: $(VENV)/.dev
	$(PYTEST) -m "not slow and not benchmark"

test-slow: $(VENV)/.dev
	$(PYTEST) -m "slow and not benchmark" --share $(SHARE) --minutes $(MINUTES) -rs

test-oldest: $(OLDEST)/.dev
	$(OLDEST)/bin/python -m pytest -q -m "not slow and not benchmark" -n 2 --dist loadfile tests/models tests/runtime tests/profiling

test-all: $(VENV)/.dev
	$(PYTEST)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.levelling
	$(BIN)/python -m benchmarks.ordering
	$(BIN)/python -m benchmarks.planner
	$(BIN)/python -m benchmarks.simulation

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(OLDEST) demo

# A stamp says that the environment holds what these two files ask for.
$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[demo,dev]'
	@touch $@

$(VENV)/.created:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "disttrain needs Python 3.11 or newer. Install it, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(OLDEST)/.dev: pyproject.toml constraints.txt
	"$(PYTHON)" -m venv $(OLDEST)
	sed 's/^torch==.*/torch==$(OLDEST_TORCH)/' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-input --disable-pip-version-check -c $(OLDEST)/constraints.txt -e '.[demo,dev]'
	@touch $@
