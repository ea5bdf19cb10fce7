# make run | check | test | lint | bench: each makes .venv on its first call; a second call installs nothing.
.PHONY: run check test lint bench chromium
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BENCH ?= loop
ARGS ?=
TWO_AT_ONCE := $(BIN)/python -m pytest -n 2 --dist loadfile

run: .venv/run.stamp
	$(BIN)/unskew run $(ARGS)

check: lint
	$(TWO_AT_ONCE) -m "not slow and not alone" $(ARGS)

# What starts ranks or measures time goes after the rest, by itself. 5: ARGS chose no test; of one kind that is well.
test: .venv/test.stamp chromium
	$(TWO_AT_ONCE) -m "not alone" $(ARGS); first=$$?; \
	test $$first = 0 || test $$first = 5 || exit $$first; \
	$(BIN)/python -m pytest -m alone $(ARGS); alone=$$?; \
	test $$alone = 5 && test $$first = 0 || exit $$alone

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/run.stamp
	mkdir -p build
	$(BIN)/unskew bench $(BENCH) --json build/bench-$(BENCH).json $(ARGS)

chromium:
	@sh tools/chromium.sh

.venv/run.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@echo "installing into .venv, once: about 2 GB, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[platform,trainer]"
	touch $@

.venv/test.stamp: .venv/run.stamp
	$(INSTALL) -e '.[dev]'
	touch $@
