# torchrun's agent on this node, again as often as ranks fail and the run file allows it.
ulimit -n "$(ulimit -Hn)" || true # torchrun on the first host holds a connection to every rank
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
  if [[ "$code" -eq 0 || -n "$stopping$stopped" || "$attempt" -ge @{restarts} ]]; then break; fi
  attempt=$((attempt + 1))
  echo "Ranks of this host failed (exit code $code); starting again, attempt $attempt of @{restarts}" >&2
done
