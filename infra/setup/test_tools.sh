#!/bin/sh
# What the tests need beside Python: a Chromium of the system, and Node with the official openai package for it.
# Installs them where that may be done, else says so in one line.
set -eu
NODE_CLIENT=tests/node

fail() {
    echo "setup: $1" >&2
    exit 1
}

# have NAME... : whether one of these commands is there
have() {
    for name in "$@"; do
        command -v "$name" >/dev/null 2>&1 && return 0
    done
    return 1
}

# from_apt WHAT PACKAGE...
from_apt() {
    what=$1
    shift
    { [ "$(id -u)" = 0 ] && have apt-get; } || fail "the tests need $what: apt-get install $*"
    echo "setup: installing $what for the tests" >&2
    log=$(mktemp)
    if ! { DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
        >"$log" 2>&1 </dev/null; then
        reason=$(tail -n 1 "$log")
        rm -f "$log"
        fail "$what could not be installed: $reason"
    fi
    rm -f "$log"
}

have chromium chromium-browser google-chrome || from_apt Chromium chromium
{ have node && have npm; } || from_apt Node nodejs npm

installed=$NODE_CLIENT/node_modules/.headrace-lock
if ! cmp -s "$NODE_CLIENT/package-lock.json" "$installed"; then
    echo "setup: installing the openai package for Node" >&2
    log=$(mktemp)
    if ! npm ci --prefix "$NODE_CLIENT" --ignore-scripts --no-audit --no-fund >"$log" 2>&1 </dev/null; then
        reason=$(grep -m 1 'npm error' "$log" || tail -n 1 "$log")
        rm -f "$log"
        fail "the openai package for Node could not be installed: $reason"
    fi
    rm -f "$log"
    cp "$NODE_CLIENT/package-lock.json" "$installed"
fi
