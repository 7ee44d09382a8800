#!/usr/bin/env bash
# The tests against a real S3 server: Debian's Ceph in memory, and s3fs, both installed where they are missing.
#   bash tests/store/s3.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

if ! command -v radosgw >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "s3: no Ceph here, and only root can install it (Debian: apt-get install radosgw ceph-mon ceph-osd)"
        exit 0
    fi
    export DEBIAN_FRONTEND=noninteractive
    install=(timeout 300 apt-get install -y -qq --no-install-recommends radosgw ceph-mon ceph-osd)
    "${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}"; } >/dev/null 2>&1 \
        || { echo "s3: Ceph cannot be installed here"; exit 0; }
fi

# In a folder of its own: s3fs needs an older python-dateutil than the one that all else is tested with.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
fsspec=$("$PYTHON" -c 'import fsspec; print(fsspec.__version__)')
"$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$packages" \
    "s3fs==$fsspec" aiobotocore==3.10.0 botocore==1.43.117 python-dateutil==2.9.0.post0 \
    || { echo "s3: s3fs cannot be installed here"; exit 0; }
PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m pytest -q -rs -p no:cacheprovider "$@" tests/store/test_s3.py
