#!/bin/bash
# The run @{name}; written by: disttrain train --emit slurm
@{options}
set -euo pipefail

@{setup}
@{exports}
job=@{job}
stop=@{stop}
child=''
again="${SLURM_RESTART_COUNT:-0}"

@{follow.sh}

mapfile -t hosts < <(scontrol show hostnames "$@{nodelist}")
export MASTER_ADDR="${hosts[0]}" MASTER_PORT=@{port} DISTTRAIN_HOSTS="${hosts[*]}"
@{serve}
@{uneven}
@{python} disttrain_cli.runtime.launching.begin "$job" --again "$again"
srun @{group}--ntasks=@{tasks} --distribution=@{distribution} --kill-on-bad-exit=1 --export=ALL \
  --cpus-per-task="${SLURM_CPUS_PER_TASK_HET_GROUP_0:-${SLURM_CPUS_PER_TASK:-@{cpus}}}" \
  @{python} disttrain_cli.runtime.launching.rank "$job" &
child=$!
code=0
follow "$child" || code=$?

@{stopped.sh}
@{finish}
if [[ "$stopped" == SIGUSR1 ]]; then
  echo "The time limit is near; queued again"
  scontrol requeue "$SLURM_JOB_ID"
elif [[ "$code" -ne 0 && -z "$stopping$stopped" && "$again" -lt @{restarts} ]]; then
  echo "Ranks failed (exit code $code); queued again, restart $((again + 1)) of @{restarts}" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
