#!/usr/bin/env bash
# Asks a public database whether the pinned dependencies have known vulnerabilities.
#
#   scripts/audit.sh
#
# It needs the internet and pip-audit, which is no dependency of this project; scripts/test.sh does not run it. pip-audit
# installs nothing here and asks about every pin in requirements/, and about torch, which scripts/lock.py pins.
#
#   0   nothing is known against them
#   1   something is: the table says which package, which advisory, and which version has the fix
#   3   pip-audit is missing
#   4   the database could not be asked: offline, or it failed. This says nothing about the dependencies
set -euo pipefail
cd "$(dirname "$0")/.."

audit=${PIP_AUDIT:-$(command -v .venv/bin/pip-audit || command -v pip-audit || true)}
if [ ! -x "$audit" ]; then
    cat >&2 <<'TEXT'
audit: pip-audit is missing. Give it an environment of its own, so that it changes nothing here:
    python3 -m venv ~/.cache/pip-audit && ~/.cache/pip-audit/bin/pip install pip-audit
    PIP_AUDIT=~/.cache/pip-audit/bin/pip-audit scripts/audit.sh
TEXT
    exit 3
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed -n 's/^TORCH = "\(.*\)"$/\1/p' scripts/lock.py >"$work/torch.txt"
[ -s "$work/torch.txt" ] || { echo "audit: scripts/lock.py does not pin torch as TORCH = \"...\"" >&2; exit 4; }
for file in requirements/*.txt; do # versions alone: they are asked about, not installed
    sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p' "$file" >"$work/$(basename "$file")"
done

vulnerable=
for file in "$work"/*.txt; do
    name=$(basename "$file")
    report=$work/report.md
    rm -f "$report"
    # pip-audit ends with 1 for findings and for failures alike; only after an answer does it write its report.
    if "$audit" --vulnerability-service osv --no-deps --disable-pip --progress-spinner off --timeout 30 \
        --format markdown --desc off --output "$report" --requirement "$file" >"$work/told" 2>&1; then
        echo "$name: nothing is known against its $(wc -l <"$file") packages"
    elif [ -s "$report" ]; then
        echo "$name:"
        cat "$report"
        vulnerable=yes
    else
        echo "audit: the database could not be asked about $name; offline? What pip-audit said last:" >&2
        tail -n 3 "$work/told" | cut -c1-300 >&2
        exit 4
    fi
done
[ -z "$vulnerable" ] || exit 1
