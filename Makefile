# `make` alone prints the targets, in the order of the story.
PYTHON ?= python3
TORCH ?=
WORKERS ?= 2
ARGS ?=
PY := .venv/bin/python
SETUP = $(PYTHON) tools/setup.py --torch "$(TORCH)" $(if $(filter file,$(origin PYTHON)),,--this-python)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help ready setup doctor test test-slurm sweep node mi355x figures report lab page test-gpu clean

help:
	@echo "m3cp: where does context-parallel decode indexing beat tensor parallelism, on this machine?"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "Each target sets up .venv by itself when that is missing. Options: PYTHON=python3.12, TORCH=cpu|cuda|present,"
	@echo "ARGS='...' for the m3cp command behind a target, GRID=grid.yaml for a sweep by papermill."

ready:
	@$(SETUP) --if-needed

setup: ## make .venv: reuse the torch that is here, install the rest (minutes)
	@$(SETUP)

doctor: ready ## what this machine is, what will be measured and what skipped, and why
	@$(PY) -m m3cp.cli doctor $(ARGS)

test: ready ## prove that the selection is right (CPU suite, under 15 minutes)
	@status=0; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal tests --ignore=tests/interpret || status=1; \
	if [ -d tests/interpret ]; then \
		echo "the kernels in Triton's interpreter:"; \
		TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal tests/interpret || status=1; \
	fi; \
	exit $$status

sweep: ready ## measure this machine, fit, draw the map; ends with the figures' paths (minutes)
	@$(PY) -m m3cp.cli sweep $(if $(GRID),$(GRID) --notebook) --fit $(ARGS)

node: ready ## a first run on any node: every step in rising risk, one archive, one page (run again until done)
	@$(PY) -m m3cp.cli node $(ARGS)

mi355x: ready ## the same on four MI355X, in one stretch of at most 15 minutes
	@$(PY) -m m3cp.cli node --name mi355x --minutes 15 $(ARGS)

figures: ready ## draw the figures again from the rows that are here
	@$(PY) -m m3cp.cli fit $(ARGS)

report: ready ## the design review: one HTML page from recorded rows, and its figures (under a minute)
	@$(PY) -m m3cp.cli report $(ARGS)

lab: ready ## open the notebooks in JupyterLab
	@$(PY) -m jupyterlab --ip=127.0.0.1 --notebook-dir=notebooks $(ARGS)

page: ready ## open the explorer of 20_crossover as a page without code (voila)
	@$(PY) -m voila "$$($(PY) -c 'from m3cp import notebook; print(notebook.page("20_crossover"))')" --Voila.ip=127.0.0.1 --token $(ARGS)

test-gpu: ready ## the GPU suite, on every GPU of this node
	@PYTHON=$(PY) bash .ci/run-gpu

test-slurm: ready ## sweeps as jobs of a real one-node Slurm (root; Debian's slurm-wlm and munge)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m slow tests/test_slurm.py

clean: ## remove .venv and caches; rows and figures stay
	@rm -rf .venv .venv.old build *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find m3cp tests tools notebooks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
