#!/usr/bin/env bash
# Pins every dependency but torch, with hashes and without index addresses, into requirements/base.txt.
# torch stays out: its CPU and CUDA builds need other packages, and setup.sh installs it first.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m piptools --version >/dev/null 2>&1 || "$python" -m pip install --quiet pip-tools
"$python" -m piptools compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links \
  --no-emit-trusted-host --allow-unsafe --strip-extras --extra dev \
  --unsafe-package torch --output-file requirements/base.txt pyproject.toml requirements/build.in
