# The two commands of this project. Both set up .venv first, which takes a while once.
PYTHON ?= python3
ARGS ?=

.PHONY: demo test lint setup

demo: setup  ## train a small Mask R-CNN on drawn shapes, test it, draw its detections
	.venv/bin/python tools/demo.py $(ARGS)

test: setup  ## run the tests
	.venv/bin/python -m pytest $(ARGS)

lint: setup  ## what CI checks besides the tests
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

setup:
	@$(PYTHON) tools/setup_env.py
