#!/bin/sh
# The browser tests drive a Chromium of the system. Installs it where that may be done, else says so.
set -eu
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing chromium for the browser tests" >&2
    log=$(mktemp)
    if DEBIAN_FRONTEND=noninteractive apt-get update -qq >"$log" 2>&1 </dev/null &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >"$log" 2>&1 </dev/null; then
        rm -f "$log"
        exit 0
    fi
    echo "setup: chromium could not be installed: $(tail -n 1 "$log")" >&2
    rm -f "$log"
    exit 1
fi
echo "setup: the browser tests need Chromium: install the package chromium (apt-get install chromium)" >&2
exit 1
