# make run | check | test | lint | bench: each makes .venv on its first call; a second call installs nothing.
# make run LOCKED=1 installs only what has a hash in requirements.lock; make lock makes that anew (it needs uv).
# make test EXTRAS=dev,frameworks,trackers tests on the real Trainer, Lightning, W&B, MLflow, TensorBoard as well.
.PHONY: run check test lint collected bench chromium lock demo
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
EXTRAS ?= dev
comma := ,
BENCH ?= loop
ARGS ?=
# What is compiled is kept: all tests are collected in 11 s of CPU then, else in 36.
unexport PYTHONDONTWRITEBYTECODE
# uv installs in half of pip's time, where pip finds things too, and compiles nothing that nobody imports. Else pip does it.
export UV_INDEX_STRATEGY := unsafe-best-match
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_EXTRA_INDEX_URL
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
install = $(PIP) -c constraints.txt uv && $(UV) -c constraints.txt $(1) || $(PIP) -c constraints.txt $(1)
TWO_AT_ONCE := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

run: .venv/run.stamp
	$(BIN)/unskew run $(ARGS)

# Types are checked by one process, while the tests begin: that is a core less idle for most of a minute.
check: .venv/test-$(EXTRAS).stamp
	$(MAKE) --jobs=2 --output-sync=target lint fast

fast: .venv/test-$(EXTRAS).stamp
	$(TWO_AT_ONCE) -m "not slow and not alone" $(ARGS)

# What judges by the time that a real processor takes goes last, by itself. 5: ARGS chose no test; of one kind that is well.
test: .venv/test-$(EXTRAS).stamp chromium
	$(TWO_AT_ONCE) -m "not alone" $(ARGS); first=$$?; \
	test $$first = 0 || test $$first = 5 || exit $$first; \
	$(BIN)/python -m pytest -m alone $(ARGS); alone=$$?; \
	test $$alone = 5 && test $$first = 0 || exit $$alone

lint: .venv/test-$(EXTRAS).stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Beside lint, which leaves a core idle: what the tests import is compiled then, by one process instead of two at once.
collected: .venv/test-$(EXTRAS).stamp
	mkdir -p build
	$(BIN)/python -m pytest --collect-only -qq >build/collected || { tail -20 build/collected; exit 1; }

bench: .venv/run.stamp
	mkdir -p build
	$(BIN)/unskew bench $(BENCH) --json build/bench-$(BENCH).json $(ARGS)

# The recorded run of `unskew dashboard --demo`, recorded anew.
demo: .venv/run.stamp
	@sh tools/demo.sh $(BIN)/unskew

chromium:
	@sh tools/chromium.sh

.venv/run.stamp: pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@echo "installing into .venv, once: about 2 GB, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifdef LOCKED
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(call install,-e '.[platform$(comma)trainer]')
endif
	touch $@

lock:
	echo setuptools | uv pip compile --quiet pyproject.toml - --extra platform --extra trainer -c constraints.txt \
		--generate-hashes --python-version 3.11 --universal --no-annotate --custom-compile-command "make lock" -o requirements.lock

.venv/test-$(EXTRAS).stamp: .venv/run.stamp
	$(call install,-e '.[$(EXTRAS)]')
	touch $@
