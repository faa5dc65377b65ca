#!/usr/bin/env bash
# Everything that has to hold before a change lands: lint, types, module sizes, tests.
#
#   scripts/test.sh            all of it, set-up included (within 40 minutes on two cores)
#   scripts/test.sh --quick    without the tests marked slow (under 5 minutes when set up)
#   further arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
quick=
if [ "${1:-}" = --quick ]; then quick=yes; shift; fi

setup=()
[ -n "$quick" ] || setup+=(--vllm) # whose tests are slow ones
scripts/setup.sh "${setup[@]}"
python=.venv/bin/python
step() { printf '\n== %s\n' "$*"; }

step "lint"
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet .

step "types"
.venv/bin/mypy

step "module sizes"
"$python" scripts/check_sizes.py

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -n "$quick" ] || [ $# -gt 0 ]; then
    step "tests"
    exec "$python" -m pytest ${quick:+-m "not slow"} "$@"
fi

# Two cores: what only computes runs beside the quick tests. Tests of whole nodes have deadlines, and run alone.
computing=(tests/bench tests/hostile tests/rollouts tests/tasks tests/training)
others=()
for path in tests/*/ tests/test_*.py; do
    [[ " ${computing[*]} " == *" ${path%/} "* || $path == *__pycache__* ]] || others+=("$path")
done
failed=
step "quick tests, beside slow ones that only compute"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest -m slow "${computing[@]}" >"$log" 2>&1 &
beside=$!
"$python" -m pytest -m "not slow" || failed=yes
wait "$beside" || failed=yes
cat "$log"
step "tests of whole nodes"
"$python" -m pytest -m slow "${others[@]}" || failed=yes
[ -z "$failed" ]
