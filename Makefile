# The first of these that will do is used, unless another is named: `make demo PYTHON=python3.12`.
PYTHON ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml README.md LICENSE $(shell find keras_paragrad -name __pycache__ -prune -o -print) $(shell find docs -name '*.md')

# Which releases of Keras and TensorFlow to install: `pinned` in constraints.txt with all that was tested with them; a pair
# of them, such as `3.10-2.19`, the oldest that pyproject.toml allows; the `newest`, with the newest of what they need; or
# `pre`, pre-releases too.
RELEASES ?= pinned
PAIRS := 3.10-2.19 3.12-2.20 3.15-2.21
# Newer linters would report what older ones did not.
LINTERS := ^(pyright|ruff)==
constraints-pinned := cat constraints.txt
constraints-newest := grep -E '$(LINTERS)' constraints.txt
# Pip takes pre-releases of what is bounded by one.
constraints-pre = { $(constraints-newest); echo 'tensorflow>=2.19.0.dev0'; }
constraints-pair = { $(constraints-newest); printf 'keras==%s.*\ntensorflow==%s.*\n' $(subst -, ,$(RELEASES)); }
# KerasHub takes no release of Keras before 3.15, and asks for tensorflow-text, which holds TensorFlow's pre-releases back and
# isn't there for Python 3.14. It does without.
EXTRA := $(if $(filter $(RELEASES),pre $(filter-out 3.15-2.21,$(PAIRS))),test,dev)
# Keras's pre-releases have a name of their own, by which TensorFlow's ask for them, and share files with the releases; so they
# are installed again once both are gone.
PRE_RELEASES = $(PIP) install -c $< grain kagglehub regex sentencepiece tokenizers && $(PIP) uninstall -y keras keras-nightly \
	&& $(PIP) install --pre --no-deps keras-nightly keras-hub-nightly
CONSTRAINTS := $(or $(constraints-$(if $(filter $(RELEASES),$(PAIRS)),pair,$(RELEASES))),$(error \
	RELEASES is pinned, newest, pre or one of $(PAIRS), not $(RELEASES)))

# Version managers put commands on the path that fail when they are run, so a candidate has to show that it works.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))

.PHONY: demo browser docs lint release-check test-fast test test-all soak durations gpu mutants fuzz ledger bench bench-peers exactness compat clean FORCE

demo: .venv/.demo
	$(BIN)/python examples/digits.py

# With three workers two cores are busy: a fifth of the time of two is spent waiting for other processes.
# A module's tests share what its fixtures start, so they stay in one worker; the slowest modules go first.
# Bytecode is kept, whatever the environment says: a test in a process of its own would compile its module anew.
# What was left out is said again at the end of all.
LEFT_OUT := .venv/left_out.txt
PYTEST := LEFT_OUT=$(LEFT_OUT) PYTHONDONTWRITEBYTECODE= $(BIN)/python -P -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 25

# What traces nothing, on the working tree: for every save.
test-fast: .venv/.dev
	PYTHONPATH=$(CURDIR) $(BIN)/python -P -m pytest -q -n 2 --dist loadfile -m "fast and not (not_fast or slow or long or own_process)"

# What opens the report and TensorBoard. Installed where no password is asked for; without it those tests are left out,
# which is said before the tests begin, and counted after them.
CHROMIUM := chromium chromium-driver fonts-dejavu-core
HAS_CHROMIUM := { command -v chromium || command -v chromium-browser || command -v google-chrome; } && command -v chromedriver

browser:
	@has_chromium() { { $(HAS_CHROMIUM); } >/dev/null 2>&1; }; \
	if ! has_chromium && command -v apt-get >/dev/null; then \
		if [ "$$(id -u)" = 0 ]; then as_root=; else as_root="sudo -n"; fi; \
		if $$as_root true 2>/dev/null; then \
			$$as_root apt-get update; $$as_root apt-get install -y --no-install-recommends $(CHROMIUM); \
		fi; \
	fi; \
	has_chromium || echo "To be left out: the tests in a browser. To run them, install Chromium and its driver:" \
		"sudo apt-get install $(CHROMIUM)"

# One of several machines' part of the tests, by recorded durations: `make test PART=1/3`. None is left out by default.
PART ?=
export PART

# Types and doctests are checked beside the tests, in one process, and shown after them.
test: browser .venv/.wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -f $(LEFT_OUT); { $(BIN)/pyright --pythonpath $(BIN)/python && $(BIN)/python -P -m pytest -q --doctest-modules --pyargs keras_paragrad; } \
		> .venv/beside.log 2>&1 & beside=$$!; \
	$(PYTEST); status=$$?; \
	wait $$beside || status=1; cat .venv/beside.log; cat $(LEFT_OUT) 2>/dev/null; exit $$status

# What a change is asked for first: in a minute, without TensorFlow.
lint: .venv/.constraints
	$(PIP) install -c $< ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What a release holds, and that it works where nothing else is installed, on each Python that there is.
release-check: .venv/.dev
	$(BIN)/python tests/release_check.py

# The tests that take too long for every change as well: each model of others in each way to train it, all combinations
# of parameters, many cases where cases are drawn, and XLA and Grappler as users have them.
# In two parts, and the second even if the first fails: XLA keeps what it compiles as long as a process lasts, and
# per_example compiles most.
LONG := XLA_FLAGS= GRAPPLER=1 CASES=10 $(PYTEST) -m 'long or hypothesis'

test-all: test
	status=0; $(LONG) tests/per_example || status=1; $(LONG) --ignore tests/per_example || status=1; exit $$status

# Workers that are killed at random, over and over, end as undisturbed training does: `make soak MINUTES=8 SEED=4`.
MINUTES ?= 30
SEED ?=

soak: .venv/.wheel
	PYTHONPATH=tests $(BIN)/python -P tests/soak/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record $(RECORD))

# Random trainings under random components, beside plain Keras on one device: `make fuzz MINUTES=60 SEED=4`. One case again:
# `make fuzz CASE=17`, or the settings that a finding ends with.
CASE ?=

fuzz: export CASE := $(CASE)
fuzz: .venv/.wheel
	PYTHONPATH=tests $(BIN)/python -P tests/fuzz/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# What becomes of each case of the census of Keras's examples, of the exactness matrix and of the first seeds of the fuzzer,
# and what is no longer as in the committed ledger. A part, or a case again: `make ledger LEDGER=census/gan`. The package of
# another tree: `make ledger PYTHONPATH=$PWD`. It goes on where it was ended.
LEDGER ?=

ledger: .venv/.wheel
	PYTHONPATH=tests:benchmarks$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -P tests/ledger/run.py $(LEDGER)

# The documentation as a site, which needs no server and no network. The first time it runs the tutorials, a minute each.
docs: .venv/.wheel
	TUTORIALS=cache $(BIN)/python -P -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "Open build/docs/index.html"

# Which modules' tests go first, by what they take on a quiet machine.
durations: .venv/.wheel
	DURATIONS=tests/durations.json $(PYTEST)

# What holds on this machine's GPU. One part alone: `make gpu PARTS="--only right"`.
PARTS ?=

gpu: .venv/.gpu
	$(BIN)/python benchmarks/gpu.py $(PARTS)

# Plants faults in a copy of the package, one at a time, and shows which test finds each. Some of them, by a part of their
# name: `make mutants FAULTS="all-reduced"`.
FAULTS ?=

mutants: .venv/.wheel
	$(BIN)/python tests/mutants/run.py $(FAULTS)

bench: .venv/.wheel
	$(BIN)/python benchmarks/run.py

# The table of the README: one setting at a time, and then a sample in which every three settings meet. All cells, which
# take days on two cores: `make exactness CELLS=--whole`.
CELLS ?= --strength 3

exactness: .venv/.wheel
	$(BIN)/python benchmarks/exactness_matrix.py $(CELLS)

# A tiny training of each component on each pair of releases, in environments of their own: `make compat PAIR=3.10-2.19`.
PAIR ?=

compat: .venv/.wheel
	$(BIN)/python benchmarks/releases.py $(PAIR)
	$(BIN)/python benchmarks/tables.py

# What the benchmarks compare with, JAX and PyTorch; without them, `make bench` leaves their rows out.
bench-peers: .venv-peers/jax/.installed .venv-peers/torch/.installed

clean:
	rm -rf .venv .venv-peers .venv-releases build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.created:
	@for python in $(PYTHONS); do \
		if "$$python" -c '$(USABLE)' 2>/dev/null; then \
			echo "Making .venv with $$python"; \
			"$$python" -m venv --clear .venv && touch $@; \
			exit; \
		fi; \
	done; \
	echo "No Python from 3.11 to 3.14 with its venv module among: $(PYTHONS)." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

# Written only when it changes, so that nothing is installed again unless it does.
.venv/.constraints: .venv/.created constraints.txt Makefile FORCE
	@$(CONSTRAINTS) | cmp -s - $@ || $(CONSTRAINTS) > $@

.venv/.demo: .venv/.constraints $(SOURCES)
	$(PIP) install -c $< '.[demo]'
	@touch $@

# With CUDA's libraries, which take gigabytes.
.venv/.gpu: .venv/.demo
	$(PIP) install -c .venv/.constraints 'tensorflow[and-cuda]'
	@touch $@

# Compiled by all cores, which pip leaves to one; what can't be compiled is nothing that is imported.
.venv/.dev: .venv/.constraints pyproject.toml
	$(PIP) install --no-compile -c $< '.[$(EXTRA)]'
	-$(BIN)/python -m compileall -qq -j 0 -x '/tests/' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(if $(filter pre,$(RELEASES)),$(PRE_RELEASES))
	@touch $@

.venv-peers/%/.installed: benchmarks/peers/requirements-%.txt .venv/.created
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -r $<
	@touch $@

# The tests run against the wheel, as users get it, and not against the working tree.
.venv/.wheel: .venv/.dev $(SOURCES)
	rm -f dist/*.whl
	$(BIN)/python -m build --wheel
	$(PIP) install --force-reinstall --no-deps dist/*.whl
	@touch $@
