# make install   create .venv with everything, pinned by constraints.txt
# make serve     serve the built-in model on 127.0.0.1:8000, until Ctrl-C        CONFIG=configs/... PORT=...
# make test      all tests that continuous integration runs
# make test-slow the rest
# make lint      ruff and mypy

PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
PORT   ?= 8000

BIN   := .venv/bin
STAMP := .venv/.installed

.PHONY: install serve test test-slow lint clean

install: $(STAMP)

# Rebuilt when what is to be installed changes; the package itself is editable.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[nixl,test]'
	touch $@

# exec: make's child is the server itself, so that a signal to the process group, or to it alone, reaches it.
serve: $(STAMP)
	@exec $(BIN)/epd serve $(CONFIG) --port $(PORT)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu" tests

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow or gpu" -o faulthandler_timeout=7200 tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
