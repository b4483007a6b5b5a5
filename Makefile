# `make` lists the targets. Every target that needs Python creates or updates .venv as needed.

PYTHON = python3
VENV = .venv
ARGS =
# The torch of test-newest and test-oldest: TORCH=torch takes the newest, with all of CUDA on Linux.
TORCH = $(shell grep '^torch==' constraints.txt)
# The Triton that belongs to it: torch for CUDA requires its own, and a newer one may interpret kernels differently.
TRITON = $(if $(findstring ==,$(TORCH)),"$(shell grep '^triton==' constraints.txt); sys_platform == 'linux'")
# How many runs of the demo run at once: two, unless there is only one core.
JOBS = $(shell [ "$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)" -gt 1 ] && echo 2 || echo 1)

PY = $(VENV)/bin/python
READY = $(VENV)/.ready
DEMO_READY = $(VENV)/.demo-ready
TEST_READY = $(VENV)/.test-ready
UNFINISHED = $(VENV)/.unfinished
SITE_READY = $(VENV)/.site-ready
# 0.2 for release 0.2.3: patch releases share a site.
MINOR = $(shell sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' src/fedcams/version.py)
# mike starts mkdocs by name.
MIKE = PATH="$(abspath $(VENV))/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike
# The user's warning filter is for fedcams, not for pip. Without --no-compile, pip would compile all modules,
# of which only a fraction is ever imported.
PIP_INSTALL = PYTHONWARNINGS= $(PY) -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help demo flower-demo test test-all test-slow test-newest test-oldest release-check lint format bench golden docs site site-version reproduction leaderboard theory constraints clean distclean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {sub(":.*", "", $$1); printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  ARGS="..." is passed on (make test ARGS="-k wire -x"), PYTHON=python3.12 chooses the interpreter of a new $(VENV).'

demo: $(DEMO_READY) ## Compare eight methods on digits, three seeds each, and write a report
	$(PY) -m fedcams run demo --jobs $(JOBS) $(ARGS)

flower-demo: $(READY) ## Run a federation over Flower with TLS and count the bytes on its sockets
	PYTHONPATH=examples/flower_app:examples/flower_demo $(PY) examples/flower_demo/demo.py $(ARGS)

test: $(TEST_READY) ## Run all tests except those in tests/thorough
	$(PY) -m pytest -n 2 --dist worksteal --ignore=tests/thorough $(ARGS)

test-all: $(READY) ## Run the thorough tests too: pages, browsers, fresh processes, Flower's own programs
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

test-slow: $(READY) ## Run the tests that take minutes: chaos over Flower, its simulation, large models
	$(PIP_INSTALL) 'flwr[simulation]'
	$(PY) -m pytest -m slow $(ARGS)

test-newest: ## Run the tests with the newest dependencies
test-oldest: ## Run the tests with the oldest declared dependencies
test-newest test-oldest: test-%:
	rm -rf build/$* && $(PYTHON) -m venv build/$*
	if [ $* = oldest ]; then $(PYTHON) tests/oldest.py; fi > build/$*/constraints.txt
	build/$*/bin/python -m pip install -q "$(TORCH)" $(TRITON)
	build/$*/bin/python -m pip install -q -c build/$*/constraints.txt -e '.[dev,wandb,mlflow]'
	build/$*/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

release-check: $(READY) ## Build wheel and sdist, install each in a new environment, and run the demo and the sdist's tests
	$(PY) tests/release_check.py $(ARGS)

lint: $(READY) ## Check format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY) ## Format the code and fix what the linter can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY) ## Time the core, whole rounds, catching up, the guard, a report, and what the adapter costs on top of Flower
	$(PY) benchmarks/core.py $(ARGS)
	$(PY) benchmarks/rounds.py $(ARGS)
	$(PY) benchmarks/catchup.py $(ARGS)
	$(PY) benchmarks/guard_cost.py $(ARGS)
	$(PY) benchmarks/report_cost.py $(ARGS)
	$(PY) benchmarks/flower.py $(if $(findstring --save,$(ARGS)),--save)

golden: $(READY) ## Write the golden payloads and rounds again (only when they change on purpose)
	$(PY) tests/make_golden.py $(ARGS)
	$(PY) tests/make_golden_rounds.py

reproduction: $(READY) ## Regenerate docs/reproduction.md, docs/small.md and what docs/theory.md shows of the recorded runs
	$(PY) -m reproduction $(ARGS)
	$(PY) -m theory_page --draw

leaderboard: $(READY) ## Regenerate docs/leaderboard.md and its pictures from leaderboard/entries
	$(PY) -m leaderboard $(ARGS)

theory: $(READY) ## Run the experiments of docs/theory.md again, and update its numbers and pictures (7 minutes on 2 cores)
	$(PY) -m theory_page $(ARGS)

docs: $(READY) ## Regenerate docs/reference.md, and build the documentation site in build/site
	$(PY) docs/make_reference.py $(ARGS)
	$(MAKE) site

site: $(SITE_READY) ## Build the documentation site in build/site; a broken link or an unreachable page is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

site-version: $(SITE_READY) ## Add this version's site to the branch gh-pages, where readers choose among versions; ARGS=--push publishes it
	$(MIKE) deploy --update-aliases $(ARGS) $(MINOR) latest
	$(MIKE) set-default $(ARGS) latest

constraints: $(SITE_READY) ## Pin in constraints.txt what is installed now
	@{ grep '^#' constraints.txt; \
	   $(PY) -m pip --disable-pip-version-check freeze --all --exclude-editable --exclude pip | sed 's/+[a-z0-9.]*$$//'; \
	} > $(VENV)/constraints.txt
	@cp $(VENV)/constraints.txt constraints.txt
	@touch $(READY)

clean: ## Remove caches and build output
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name $(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove those and .venv
	rm -rf $(VENV)

# A stamp appears only when everything is installed. A .venv left unfinished, or without a working pip, is created again;
# a complete one that is only older than its two sources is updated in place. The demo needs the fewest packages.
$(DEMO_READY): pyproject.toml constraints.txt $(PY)
	@rm -f $@
	@if [ -e $(UNFINISHED) ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "$(PYTHON) is Python %d.%d, but fedcams needs 3.11 or newer; name one that is: make PYTHON=python3.12" % v[:2])' && \
	  echo "Making $(VENV) with $$($(PYTHON) --version)" && \
	  PYTHONWARNINGS= $(PYTHON) -m venv --clear $(VENV); \
	fi
	@touch $(UNFINISHED)
	@torch=$$(grep '^torch==' constraints.txt) && echo "Installing $$torch" && $(PIP_INSTALL) "$$torch"
	@echo "Installing fedcams"
	@$(PIP_INSTALL) -e '.[tasks]'
	@mv -f $(UNFINISHED) $@

$(TEST_READY): $(DEMO_READY)
	@echo "Installing what the tests need"
	@rm -f $@ && mv -f $(DEMO_READY) $(UNFINISHED)
	@$(PIP_INSTALL) -e '.[test]'
	@mv -f $(UNFINISHED) $(DEMO_READY) && touch $@

$(READY): $(TEST_READY)
	@echo "Installing the tools of development"
	@rm -f $@ && mv -f $(DEMO_READY) $(UNFINISHED)
	@$(PIP_INSTALL) -e '.[dev]'
	@mv -f $(UNFINISHED) $(DEMO_READY) && touch $(TEST_READY) $@

# What only the site needs: no other target waits for it.
$(SITE_READY): $(READY) docs/requirements.txt
	@echo "Installing the tools of the documentation site"
	@$(PIP_INSTALL) -r docs/requirements.txt
	@touch $@

# No recipe: if the interpreter is gone, the stamp is out of date.
$(PY):
