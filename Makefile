PYTHON ?= python3
SCALE ?= laptop
JOBS ?= 1
N ?= 10
FORMAT ?= hex:16
REPETITIONS ?= 60
OUTPUT ?= canaries
BIN := .venv/bin

run: .venv/ready
	$(BIN)/python -m lib run --scale $(SCALE)

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/book

sweep: .venv/ready
	$(BIN)/python -m lib sweep --scale $(SCALE) --jobs $(JOBS) $(if $(GRID),--grid $(GRID)) $(if $(CELLS),--cells $(CELLS))

cases: .venv/ready
	$(BIN)/python -m lib cases --scale $(SCALE) --jobs $(JOBS)

scorecard: .venv/ready
	$(BIN)/python -m lib scorecard --scale $(SCALE) --jobs $(JOBS)

inversion: .venv/ready
	$(BIN)/python -m lib inversion --scale $(SCALE) --jobs $(JOBS)

audit: .venv/ready
	$(BIN)/python -m lib audit --scale $(SCALE)

canaries: .venv/ready
	$(BIN)/python -m lib canaries --n $(N) --format $(FORMAT) --repetitions $(REPETITIONS) --output $(OUTPUT)

fast: .venv/ready
	$(BIN)/python -m lib fast --scale $(SCALE)

bench: .venv/ready
	$(BIN)/python tests/benchmarks/bench.py --scale $(SCALE)

reference: run sweep cases scorecard inversion fast audit
	$(BIN)/python -m lib reference --scale $(SCALE)
	$(BIN)/python -m lib notebooks

notebooks: .venv/ready
	$(BIN)/python -m lib notebooks

book: .venv/ready
	$(BIN)/python -m lib book

test-book: book
	OMP_NUM_THREADS=1 LEAKBOOK_BOOK=outputs/book $(BIN)/python -m pytest tests/book

lint: .venv/ready
	$(BIN)/ruff check lib tests notebooks book examples && $(BIN)/ruff format --check lib tests examples book/conf.py

clean:
	rm -rf .venv outputs/local outputs/book

.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -m lib fetch
	touch $@

.PHONY: run test sweep cases scorecard inversion fast audit canaries bench reference notebooks book test-book lint clean
