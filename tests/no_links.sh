#!/usr/bin/env bash
# A clone without symbolic links (as Git makes it on Windows by default): building it and importing it are refused with a
# reason. A source distribution, which holds no links, builds and is imported there.
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
python=${PYTHON:-python3}

git clone -q -c core.symlinks=false "$home" clone
test ! -L clone/src/shrinkpoint/codec
"$python" -m venv venv
venv/bin/python -m pip install -q 'setuptools>=77' build
for command in "venv/bin/python -m pip wheel -q --no-deps --no-build-isolation -w dist ./clone" \
    "env PYTHONPATH=clone/src venv/bin/python -c 'import shrinkpoint; shrinkpoint.compress'"; do
    if bash -c "$command" >said 2>&1; then
        echo "not refused: $command"
        exit 1
    fi
    grep -q "is a file here and a symbolic link in the repository" said || { cat said; exit 1; }
done

(cd "$home" && "$scratch/venv/bin/python" -m build -q --sdist --outdir "$scratch/dist" . >/dev/null)
mkdir source
tar xzf dist/*.tar.gz -C source --strip-components 1
test -z "$(find source -type l)"
venv/bin/python -m pip wheel -q --no-deps --no-build-isolation -w wheels ./source
venv/bin/python -m zipfile -l wheels/*.whl >listed
grep -q shrinkpoint/codec/compress.py listed  # in a pipe, grep -q would end the writer with an error
echo "a checkout without links is refused; the source distribution builds"
