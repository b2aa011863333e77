# A signal asks the ranks to stop after their step, with a checkpoint; a second one ends them within seconds.
stopping='' heard=''
# shellcheck disable=SC2329 # the traps below call it
on_signal() {
  heard=yes
  if [[ -n "$stopping" ]]; then kill -TERM "$child" 2>/dev/null || true; fi
  stopping="${stopping:-$1}"
  { echo "$stopping" > "$stop.new" && mv "$stop.new" "$stop"; } || touch "$stop" || true
}
for signal in TERM INT USR1; do
  # shellcheck disable=SC2064 # the signal's name now
  trap "on_signal SIG$signal" "$signal"
done

# Wait for a process to end, also where signals come in between; gives its exit code.
follow() {
  local code=0 again
  wait "$1" || code=$?
  while [[ -n "$heard" ]]; do
    heard='' again=0
    wait "$1" || again=$?
    [[ "$again" -eq 127 ]] || code="$again" # 127: the first wait had its code already
  done
  return "$code"
}
