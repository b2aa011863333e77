# Preprocessing workers on the other component's nodes; the ranks learn their addresses.
DISTTRAIN_WORKERS=''
while read -r host; do
  for ((number = 0; number < @{processes}; number++)); do
    DISTTRAIN_WORKERS+="${DISTTRAIN_WORKERS:+,}grpc+tls://$host:$((@{first} + number))"
  done
done < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
export DISTTRAIN_WORKERS
# shellcheck disable=SC2016 # every node puts its own name in
srun --het-group=1 --export=ALL --ntasks-per-node=1 --cpus-per-task=@{cores} bash -c '
  cert=${1//"{host}"/$SLURMD_NODENAME} key=${2//"{host}"/$SLURMD_NODENAME}
  shift 2
  exec "$@@" --tls-cert "$cert" --tls-key "$key"' serve @{cert} @{key} \
  @{python} @{command} &
serve=$!
trap 'kill "$serve" 2>/dev/null || true' EXIT
