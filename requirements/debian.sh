#!/bin/sh
# Installs what requirements/debian.txt lists and this machine lacks, where it may; otherwise prints the line to run.
# Never fails: the main job runs without these packages (no C++ tests then), and CMake says when Python.h is missing.
list=$(dirname "$0")/debian.txt
python=${1:-python3}
if ! command -v dpkg-query >/dev/null; then
  echo "zeropg: not a Debian system; install the equivalents of: $(grep -v '^#' "$list" | tr '\n' ' ')"
  exit 0
fi
missing=
for package in $(grep -v '^#' "$list"); do
  if [ "$package" = python3-dev ] &&
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
    continue
  fi
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ]; then
  sudo=
elif sudo -n true 2>/dev/null; then
  sudo="sudo -n"
else
  sudo=refused
fi
if [ "$sudo" != refused ]; then
  echo "zeropg: installing Debian packages:$missing"
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get update -qq </dev/null
  $sudo apt-get install -y -qq --no-install-recommends $missing </dev/null >/dev/null && exit 0
fi
echo "zeropg: for the C++ tests and every feature, run once: sudo apt-get install -y$missing"
exit 0
