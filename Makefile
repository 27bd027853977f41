# `make parity` runs the main job, `make test` every test, `make faults` that the laws can fail,
# `make bench` times; all set up `.venv` first.
PYTHON ?= python3
BIN := .venv/bin
# Neither OpenMP nor BLAS threads help tensors this small.
export OMP_NUM_THREADS ?= 1

.PHONY: parity test faults fixtures bench mutation lint setup clean
parity: setup
	$(BIN)/python -m parity $(ARGS)

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

faults: setup
	$(BIN)/python -m parity faults $(ARGS)

# `make fixtures ARGS=regenerate` computes the golden fixtures.
fixtures: setup
	$(BIN)/python -m fixtures $(or $(ARGS),check)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# Nightly: needs hours, and cosmic-ray, which `make setup` leaves out.
mutation: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt cosmic-ray
	$(BIN)/python -m tests.mutation.run $(ARGS)

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
