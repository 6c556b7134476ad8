#!/bin/sh
# Installs what requirements/debian.txt lists and this machine lacks, where it may; otherwise prints the line to run.
# Never fails: the main job runs without these packages (no C++ tests then), and CMake says when Python.h is missing.
folder=$(cd "$(dirname "$0")" && pwd)
python=${1:-python3}
packages=$(grep -v '^#' "$folder/debian.txt" | tr '\n' ' ')
if ! command -v dpkg-query >/dev/null; then
  echo "zeropg: not a Debian system; install the equivalents of: $packages"
  exit 0
fi

has_python_headers() {
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

# Python.h is the one thing that a build cannot do without, and unpacking it takes no rights.
unpack_python_headers() {
  headers=$folder/../build/python-headers
  mkdir -p "$headers/lists/partial" "$headers/cache/archives/partial" && cd "$headers" || return 1
  apt="apt-get -qq -o Dir::State::Lists=$headers/lists -o Dir::Cache=$headers/cache"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  $apt update </dev/null && $apt download "libpython$version-dev" && dpkg-deb -x libpython*.deb . && rm -rf lists cache
}

missing=
for package in $packages; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' && continue
  [ "$package" = python3-dev ] && has_python_headers && continue
  missing="$missing $package"
done
[ -z "$missing" ] && exit 0

sudo=refused
if [ "$(id -u)" = 0 ]; then
  sudo=
elif sudo -n true 2>/dev/null; then
  sudo="sudo -n"
fi
if [ "$sudo" != refused ]; then
  echo "zeropg: installing Debian packages:$missing"
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get -qq update </dev/null
  $sudo apt-get -qq install -y --no-install-recommends $missing </dev/null >/dev/null && exit 0
  for package in $missing; do  # one that this release does not have must not keep the others out
    $sudo apt-get -qq install -y --no-install-recommends "$package" </dev/null >/dev/null 2>&1
  done
fi
has_python_headers || unpack_python_headers
echo "zeropg: for the C++ tests and every feature, run once: sudo apt-get install -y$missing"
exit 0
