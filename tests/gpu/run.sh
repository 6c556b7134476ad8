#!/usr/bin/env bash
# Builds zeropg on a machine with a GPU and runs what there is for CUDA, in under ten minutes.
#
#   tests/gpu/run.sh                     with what is installed; nothing is downloaded
#   tests/gpu/run.sh --allow-pip         may `pip install` what is missing (cmake, ninja, pytest, safetensors, tqdm, numpy)
#   PYTHON=/path/python tests/gpu/run.sh -k ddp     the rest goes to pytest
#
# Needs: a Python with torch (built for CUDA) and Python.h, g++ 12 or newer, cmake 3.22 or newer, ninja or make, pytest.
# nvcc is used where there is one of torch's major version; without it the CUDA kernels are left out, which torch's own
# kernels and NCCL make up for. Status: 0 all passed, 1 something failed, 2 something is missing (and what to do).
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
start=$SECONDS
allow_pip=
if [ "${1:-}" = --allow-pip ]; then
  allow_pip=1
  shift
fi
case ${1:-} in
-h | --help)
  sed -n '2,11s/^# \{0,1\}//p' "$0"
  exit 0
  ;;
esac

say() { printf '\n== %s\n' "$*"; }
missing() {
  printf 'tests/gpu/run.sh: %s\n' "$1" >&2
  printf '  -> %s\n' "$2" >&2
  exit 2
}
# The first of the candidates that exists.
find_program() {
  for candidate in "$@"; do
    command -v "$candidate" && return 0
  done
  return 1
}

say "what is here"
python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in .venv/bin/python python3 python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import torch' 2>/dev/null; then
      python=$(command -v "$candidate")
      break
    fi
  done
fi
[ -n "$python" ] || missing "no Python here can import torch (.venv/bin/python, python3, python)" \
  "set PYTHON to one that can; or pip install torch==2.15.0"
"$python" - <<'PY' || exit 2
import importlib.util, platform, sys, sysconfig
import torch
print(f"python {platform.python_version()} ({sys.executable})")
print(f"torch  {torch.__version__}, built for CUDA {torch.version.cuda}")
if torch.version.cuda is None:
    sys.exit("tests/gpu/run.sh: this torch is a CPU build\n  -> install a CUDA build of torch, or set PYTHON")
if not torch.cuda.is_available():
    sys.exit("tests/gpu/run.sh: torch finds no GPU (driver missing, or older than torch's CUDA)\n"
             "  -> see nvidia-smi; without a GPU run `make test`, which skips these tests")
for index in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(index)
    print(f"GPU {index}  {facts.name}, {facts.total_memory / 2**30:.0f} GiB, sm_{facts.major}{facts.minor}")
print(f"NCCL   {'.'.join(map(str, torch.cuda.nccl.version()))}")
PY

# Packages that a build or the tests need, in this Python.
wanted=
for package in cmake:cmake ninja:ninja pytest:pytest numpy:numpy safetensors:safetensors tqdm:tqdm; do
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('${package%%:*}') is None)" 2>/dev/null ||
    wanted="$wanted ${package##*:}"
done
bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
export PATH="$bin:$PATH"
if [ -n "$wanted" ] && [ -n "$allow_pip" ]; then
  # shellcheck disable=SC2086
  "$python" -m pip install -q $wanted || missing "pip could not install:$wanted" "install them by hand, or leave --allow-pip out"
fi
cmake=$(find_program "$bin/cmake" cmake) || missing "no cmake" "apt-get install cmake, or --allow-pip"
for package in pytest numpy safetensors tqdm; do
  "$python" -c "import $package" 2>/dev/null || missing "$python has no $package" "pip install $package, or --allow-pip"
done
compiler=$(find_program "${CXX:-g++}" g++-14 g++-13 g++-12) || missing "no g++" "apt-get install g++ (12 or newer)"
major=$("$compiler" -dumpversion | cut -d. -f1)
[ "$major" -ge 12 ] || missing "$compiler is version $major, C++20 needs 12" "apt-get install g++-12, and set CXX"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] || missing "no $headers/Python.h" "apt-get install python3-dev"
generator=Ninja
find_program "$bin/ninja" ninja >/dev/null || generator="Unix Makefiles"
if [ "$generator" != Ninja ]; then
  command -v make >/dev/null || missing "neither ninja nor make" "apt-get install ninja-build, or --allow-pip"
fi

# nvcc: a toolkit of the machine, or NVIDIA's wheels beside torch.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
nvcc=$(find_program "${CUDACXX:-nvcc}" nvcc /usr/local/cuda/bin/nvcc "$site"/nvidia/cu*/bin/nvcc "$site"/nvidia/cuda_nvcc/bin/nvcc)
cuda=()
if [ -n "$nvcc" ]; then
  architectures=$("$python" -c '
import torch
print(";".join(sorted({"%d%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})))')
  echo "nvcc   $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') ($nvcc), for sm_$architectures"
  cuda=("-DCMAKE_CUDA_COMPILER=$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=$architectures" "-DCUDAToolkit_ROOT=$(dirname "$(dirname "$nvcc")")")
else
  echo "nvcc   none: no CUDA kernels of zeropg's own are compiled; torch's and NCCL's are used"
fi

say "build"
build=build/gpu-torch-$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
log=$build/log.txt
mkdir -p "$build"
if ! CXX=$compiler "$cmake" -S . -B "$build" -G "$generator" "-DPython3_EXECUTABLE=$python" "${cuda[@]}" >"$log" 2>&1 ||
  ! "$cmake" --build "$build" --parallel "$(nproc)" --target _C >>"$log" 2>&1; then
  grep -E -m 5 -B 2 -A 12 'error|Error' "$log" | head -60
  echo "the whole log: $log"
  exit 1
fi
grep -E 'CUDA kernels' "$log"
echo "built in $((SECONDS - start)) s: $build/python/zeropg"

say "tests"
export PYTHONPATH="$build/python:.:${PYTHONPATH:-}" OMP_NUM_THREADS=1 ZEROPG_BUILD_DIR=$build
remaining=$((570 - (SECONDS - start)))
# -s: each test says what it showed; -rs: and each skipped one why not.
timeout --kill-after 10 "$remaining" "$python" -m pytest tests/gpu -m cuda -v -s -rs --durations=5 -p no:cacheprovider "$@"
status=$?
[ $status -ne 124 ] || echo "the tests did not end within $remaining s"

say "doctor"
"$python" -m zeropg doctor --no-self-test | sed -n '/^GPU/,/^$/p'
echo "$((SECONDS - start)) s in all"
[ $status -eq 0 ] || exit 1
