#!/bin/sh
# Install the Debian packages that the named extras need beyond Python; most need none.
# Where packages may not be installed, say what is missing and go on: everything else still works.
set -eu

packages=""
for extra in "$@"; do
    case "$extra" in
        # Headless rendering of MuJoCo: EGL, or OSMesa where there is no EGL.
        sim | all) packages="$packages libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6" ;;
    esac
    case "$extra" in
        # A browser that looks at the pages which are tested.
        service | all) packages="$packages chromium chromium-driver" ;;
    esac
done

# $1 words: what some packages are for.
purpose() {
    for package in $1; do
        case "$package" in
            chromium*) echo "tests of pages in a browser" ;;
            *) echo "rendering in simulation" ;;
        esac
    done | sort -u | paste -sd, - | sed 's/,/ and /'
}

missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "system-packages: not a Debian system; $(purpose "$missing") need the equivalents of:$missing" >&2
    exit 0
elif [ "$(id -u)" != 0 ]; then
    echo "system-packages: $(purpose "$missing") need packages; run: sudo apt-get install$missing" >&2
    exit 0
fi

echo "system-packages: installing$missing"
export DEBIAN_FRONTEND=noninteractive
install() { apt-get -qq install -y --no-install-recommends "$@" 2>&1; }
if ! output=$(apt-get -qq update 2>&1); then
    failed=$missing
# shellcheck disable=SC2086  # a list of words
elif output=$(install $missing); then
    exit 0
else
    failed=""
    for package in $missing; do  # one that there is not must not keep the others away
        install "$package" >/dev/null || failed="$failed $package"
    done
fi
[ -n "$failed" ] || exit 0
echo "$output" | tail -n 5 >&2
echo "system-packages: could not install$failed; $(purpose "$failed") need them, nothing else does" >&2
