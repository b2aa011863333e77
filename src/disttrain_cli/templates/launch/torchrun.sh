#!/usr/bin/env bash
# Ranks @{span} of the run @{name} on its host @{node} of @{nodes}; written by: disttrain train --emit torchrun
set -euo pipefail

@{setup}
@{exports}
export DISTTRAIN_HOSTS=@{hosts}
ulimit -n "$(ulimit -Hn)" || true # torchrun on the first host holds a connection to every rank
job=@{job}
stop=@{stop}
child=''

@{follow.sh}

attempt=0
while true; do
  port=$((@{port} + attempt))
  @{begin}
  @{python} disttrain_cli.runtime.launching.agent --nnodes=@{nodes} --node-rank=@{node} --nproc-per-node=@{ranks} \
    --master-addr=@{master} --master-port="$port" --max-restarts=0 --shutdown-timeout=20 \
    -m disttrain_cli.runtime.launching.rank "$job" &
  child=$!
  code=0
  follow "$child" || code=$?
  @{stopped.sh}
  if [[ "$code" -eq 0 || -n "$stopping$stopped" || "$attempt" -ge @{restarts} ]]; then exit "$code"; fi
  attempt=$((attempt + 1))
  echo "Ranks of this host failed (exit code $code); starting again, attempt $attempt of @{restarts}" >&2
done
