#!/usr/bin/env bash
# Four nodes on this machine find each other, exchange rollouts and learn: sets up if needed, then runs the demo.
#
#   scripts/demo.sh [options of `sapo-node swarm`, for example --minutes 3 or --set training.lr=0]
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
"$here/scripts/setup.sh"
exec "$here/.venv/bin/sapo-node" swarm --nodes 4 --demo "$@"
