#!/usr/bin/env bash
# Ranks @{span} of the run @{name} on its host @{node} of @{nodes}; written by: disttrain train --emit torchrun
set -euo pipefail

@{setup}
@{exports}
export DISTTRAIN_HOSTS=@{hosts}
job=@{job}
stop=@{stop}
child=''

@{follow.sh}

@{agent.sh}
@{finish}
exit "$code"
