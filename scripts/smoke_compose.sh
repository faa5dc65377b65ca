#!/usr/bin/env bash
# Builds docker-compose.yml's swarm, runs it, and checks from outside that it does what it says. Needs Docker with
# compose, and 9 GB of memory for vLLM. Ends with 0 if everything held, and leaves no container, volume or network.
#
#   scripts/smoke_compose.sh                 two nodes on vLLM
#   scripts/smoke_compose.sh transformers    two nodes that sample beside the trainer
#
# 1. The image builds. 2. The bootstrap peer and both nodes are ready. 3. Each node has trained on groups of the other.
# 4. The bootstrap is stopped, and both go on with rounds and with each other's groups. 5. It is started again, with the
# same peer id, and both are connected to it. 6. Nodes that are stopped drain in time and keep a checkpoint. 7. Nothing
# is left behind.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=${1:-vllm}
case $engine in
  vllm | transformers) export SAPO_NODE_INFERENCE__ENGINE=$engine ;;
  -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "smoke: the engine is vllm or transformers, not $engine" >&2; exit 2 ;;
esac
project=sapo-smoke-$$
label=com.docker.compose.project=$project
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(--project-name "$project")
SUMMARY=()

say() { printf 'smoke %4d s: %s\n' "$SECONDS" "$*"; }
held() { SUMMARY+=("$*"); say "ok: $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }

finish() {
  local code=$?
  trap - EXIT INT TERM
  if [ "$code" -ne 0 ]; then
    say "the last lines of each container:" >&2
    for container in $(docker ps --all --quiet --filter "label=$label"); do
      docker inspect --format '-- {{.Name}}: {{.State.Status}}, exit code {{.State.ExitCode}}' "$container" >&2
      docker logs --tail 15 "$container" 2>&1 | cut -c1-600 >&2
    done
    "${compose[@]}" down --volumes --timeout 20 >/dev/null 2>&1 || say "could not take it down" >&2
  fi
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# wait_for SECONDS WHAT COMMAND...: until the command succeeds; fails when a container ended meanwhile.
wait_for() {
  local seconds=$1 what=$2 ended end
  shift 2
  end=$((SECONDS + seconds))
  say "waiting for $what (at most $seconds s)"
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || fail "no sign of $what within $seconds s"
    ended=$(docker ps --all --filter "label=$label" --filter status=exited --format '{{.Names}}' | grep -vx "${STOPPED:-}" || true)
    [ -z "$ended" ] || fail "$ended ended while waiting for $what"
    ended=$(docker ps --quiet --filter "label=$label" | xargs docker inspect --format '{{if .RestartCount}}{{.Name}}{{end}}' | paste -sd' ')
    [ -z "${ended// /}" ] || fail "$ended failed and was restarted while waiting for $what"
    sleep 2
  done
}

container() { docker ps --all --quiet --filter "label=$label" --filter "label=com.docker.compose.service=$1" ${2:+--filter "label=com.docker.compose.container-number=$2"}; }
json() { docker exec "$1" sapo-node status --json; }
number() { json "$1" | grep -o "\"$2\":[0-9]*" | head -1 | cut -d: -f2; }
word() { json "$1" | grep -o "\"$2\":\"[^\"]*\"" | head -1 | cut -d'"' -f4; }
healthy() { local one; for one in "$@"; do [ "$(docker inspect --format '{{.State.Health.Status}}' "$one")" = healthy ] || return 1; done; }
trained_on() { docker exec "$1" grep -q "\"external_producers\":{[^}]*\"$2\"" /data/history.jsonl; }
connected() { json "$1" | grep -o '"found":{[^}]*}' | grep -o ':[0-9]*' | tr -d : | awk '{all += $1} END {exit !(all >= 2)}'; }
beyond() { [ "$(number "$1" round)" -ge "$2" ] && [ "$(number "$1" external_groups_used)" -gt "$3" ]; }

say "building the image for $engine"
"${compose[@]}" build
held "the image builds: $(docker image inspect --format '{{.Size}}' "sapo-node:$engine" | awk '{printf "%.1f GB", $1 / 1e9}')"

"${compose[@]}" up --detach --scale node=2
bootstrap=$(container bootstrap) first=$(container node 1) second=$(container node 2)
wait_for 900 "the bootstrap peer and both nodes to be ready" healthy "$bootstrap" "$first" "$second"
for node in "$first" "$second"; do
  [ "$(word "$node" engine)" = "$engine" ] || fail "a node samples with '$(word "$node" engine)' instead of $engine"
done
held "all ready, the nodes on $engine"

first_id=$(word "$first" peer_id) second_id=$(word "$second" peer_id) bootstrap_id=$(word "$bootstrap" peer_id)
wait_for 300 "node 1 to train on groups of node 2 ($second_id)" trained_on "$first" "$second_id"
wait_for 300 "node 2 to train on groups of node 1 ($first_id)" trained_on "$second" "$first_id"
held "each node trained on groups of the other"
if docker logs "$first" 2>&1 | grep "layer of the sandbox"; then
  say "note: this Docker engine forbids a layer of the scorers' sandbox, see above"
fi

STOPPED=$(docker inspect --format '{{.Name}}' "$bootstrap" | tr -d /)
"${compose[@]}" stop bootstrap
one=$(number "$first" round) two=$(number "$second" round)
one_used=$(number "$first" external_groups_used) two_used=$(number "$second" external_groups_used)
wait_for 300 "ten further rounds of node 1 without the bootstrap peer" beyond "$first" "$((one + 10))" "$((one_used + 10))"
wait_for 300 "ten further rounds of node 2 without the bootstrap peer" beyond "$second" "$((two + 10))" "$((two_used + 10))"
held "ten rounds each and more of the other's groups without the bootstrap peer"

"${compose[@]}" start bootstrap
STOPPED=
wait_for 90 "the bootstrap peer to be ready again" healthy "$bootstrap"
[ "$(word "$bootstrap" peer_id)" = "$bootstrap_id" ] || fail "the bootstrap peer came back with another peer id"
# Within seconds by itself, or when the nodes dial it again: every five minutes, give or take a half.
wait_for 480 "the bootstrap peer to be connected to both nodes" connected "$bootstrap"
held "the bootstrap peer is back under its old peer id, and connected to both nodes"

rounds="$(number "$first" round) and $(number "$second" round)"
faults="$(number "$first" engine_restarts) and $(number "$second" engine_restarts) restarts of the engine"
memory=$(docker stats --no-stream --format '{{.Name}} {{.MemUsage}}' "$first" "$second" "$bootstrap" | sed "s/$project//" | paste -sd';')
stopping=$SECONDS
"${compose[@]}" stop node
took=$((SECONDS - stopping))
for node in "$first" "$second"; do
  code=$(docker inspect --format '{{.State.ExitCode}}' "$node")
  [ "$code" = 0 ] || fail "a node that was stopped ended with $code instead of 0"
  docker logs "$node" 2>&1 | tail -20 | grep -q '"event":"stopped"\|stopped' || fail "a node that was stopped does not say so"
done
held "the nodes drained within $took s and ended with 0"

"${compose[@]}" down --volumes
left=$(docker ps --all --quiet --filter "label=$label"; docker volume ls --quiet --filter "label=$label"; docker network ls --quiet --filter "label=$label")
[ -z "$left" ] || fail "left behind: $left"
held "nothing is left behind"

printf '\n%s\n' "Swarm of two nodes on $engine: everything held in $SECONDS s, after $rounds rounds."
printf '  - %s\n' "${SUMMARY[@]}" "$faults" "memory: $memory"
