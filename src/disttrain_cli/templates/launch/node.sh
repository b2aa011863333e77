#!/usr/bin/env bash
# Ranks of the run @{run} on any of its @{nodes} nodes; written by: disttrain train --emit @{kind}
set -euo pipefail

@{exports}
@{place}
counts=(@{counts})
export DISTTRAIN_HOSTS="${hosts[*]}"
@{workers}
job=@{job}
stop=@{stop}
begun=@{begun}
child=''

@{follow.sh}

# The first node prepares the start; the job goes on from its checkpoints where it has been started before.
begin() {
  local again="$attempt"
  if [[ -e "$begun" ]]; then again=$((attempt + 1)); fi
  @{python} disttrain_cli.runtime.launching.begin "$job" --again "$again" --port "$port"
  touch "$begun"
}

# The first node's name may take a while to be known.
for ((waited = 0; waited < 300; waited++)); do
  if [[ -n "$stopping" ]]; then exit 143; fi # before there is anything to stop
  if getent ahosts "${hosts[0]}" > /dev/null; then break; fi
  sleep 1
done

@{agent.sh}
@{finish}
# What started this script goes by its exit code: 143 for ranks that were told to end and have a checkpoint, 1 for a
# job that is refused (`begin`, above), 4 for ranks that failed. A stop file is the user's, who wants no new start.
if [[ "$code" -eq 0 || "$stopped" == "stop file" ]]; then exit 0; fi
if [[ -n "$stopped" ]]; then exit 143; fi
exit 4
