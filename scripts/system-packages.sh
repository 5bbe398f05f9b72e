#!/bin/sh
# Install the Debian packages that the named extras need beyond Python; most need none.
# Where packages may not be installed, say what is missing and go on: everything else still works.
set -eu

packages=""
for extra in "$@"; do
    case "$extra" in
        # Headless rendering of MuJoCo: EGL, or OSMesa where there is no EGL.
        sim | all) packages="libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6" ;;
    esac
done

missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "system-packages: not a Debian system; rendering in simulation needs the equivalents of:$missing" >&2
    exit 0
elif [ "$(id -u)" != 0 ]; then
    echo "system-packages: rendering in simulation needs packages; run: sudo apt-get install$missing" >&2
    exit 0
fi

echo "system-packages: installing$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of words
if ! output=$(apt-get -qq update 2>&1 && apt-get -qq install -y --no-install-recommends $missing 2>&1); then
    echo "$output" | tail -n 5 >&2
    echo "system-packages: could not install$missing; rendering in simulation needs them, nothing else does" >&2
fi
