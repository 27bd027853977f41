# `make parity` runs the main job, `make test` every test, `make bench` times; all set up `.venv` first.
PYTHON ?= python3
BIN := .venv/bin
# Neither OpenMP nor BLAS threads help tensors this small.
export OMP_NUM_THREADS ?= 1

.PHONY: parity test bench lint setup clean
parity: setup
	$(BIN)/python -m parity $(ARGS)

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/ready

# An image that brings torch and triton keeps them: the environment then looks into that Python's packages, and the pins
# of the two do not apply.
.venv/ready: pyproject.toml constraints.txt tests/tokenizers.txt
	$(PYTHON) setup_environment.py .venv
	$(BIN)/python -m tests.tokenizer_files .venv/tokenizers
	touch $@

clean:
	rm -rf .venv
