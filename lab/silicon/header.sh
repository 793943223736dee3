#!/bin/bash
# SIMULATED Ascend package of the lab: @TITLE@. Self-extracting: this script, then a tar archive.
# Like the real packages it verifies itself, unpacks to a temporary directory and hands all options to its installer.
set -euo pipefail

case "${1:-}" in
    "" | --help | -h)
        echo "Usage: $0 --full|--run|--upgrade|--uninstall|--version|--check [--quiet] [--force] [--install-for-all]"
        echo "       [--install-username=USER --install-usergroup=GROUP] [--install-path=/usr/local/Ascend]"
        exit 0
        ;;
esac

archive() { tail -n +@LINES@ "$0"; }

printf 'Verifying archive integrity...  '
if [ "$(archive | sha256sum | cut -d' ' -f1)" != @SHA256@ ]; then
    echo "Error in SHA256 checksums: the archive is damaged"
    exit 1
fi
echo '100%   SHA256 checksums are OK. All good.'

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
echo 'Uncompressing @TITLE@  100%'
archive | tar -x -C "$directory"
code=0
python3 "$directory/install.py" "$@" || code=$?
exit "$code"
# The archive follows.
