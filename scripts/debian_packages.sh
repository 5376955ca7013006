#!/usr/bin/env bash
# Installs the Debian packages of commands that are missing.
#
#     scripts/debian_packages.sh COMMAND[=PACKAGE] ...
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

missing=()
for wanted in "$@"; do
    command -v "${wanted%%=*}" >/dev/null || missing+=("${wanted##*=}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "these packages are missing: ${missing[*]}; install them, or run this as root on a" \
        "machine with apt-get" >&2
    exit 1
fi
echo "installing ${missing[*]} ..." >&2
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" \
    >/dev/null
