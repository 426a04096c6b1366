#!/usr/bin/env bash
# Runs the tests in .venv, which it makes where needed; arguments go to pytest:
#   bash launch/test.sh tests/data -k ablation
# MEMCALIB_LOCOMO and MEMCALIB_RPEVAL name the data files of the tests that skip without them.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ensure_venv test
ensure_smollm2
cd "$ROOT"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$VENV_PYTHON" -m pytest -n 2 -q "$@"
