#!/usr/bin/env bash
# Preprocessing workers of the run @{run}; written by: disttrain train --emit jobset
set -euo pipefail

ended=@{ended}
@{python} @{command} &
child=$!

# All pods are asked to end at once: ranks need data for the step that they end with.
trap 'until [[ -e "$ended" ]]; do sleep 1; done; kill -TERM "$child"' TERM INT

code=0
while kill -0 "$child" 2> /dev/null; do
  code=0
  wait "$child" || code=$?
done
exit "$code"
