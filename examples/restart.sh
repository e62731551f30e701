#!/bin/bash
# Train on one machine, and restart the run after failures that a restart fixes (exit code 75).
#
#     examples/restart.sh EXPERIMENT OUTPUT_DIR [OVERRIDE ...]
#
# Stops on every other exit code, and after 3 consecutive failures at the same step. RESTART_DELAY_S (default: 30)
# is the number of seconds between a failure and the restart. RANKS=N trains on N ranks under torchrun, which exits
# with 1 for every failure: the script then reads the exit code from last_failure.json. Exit codes: docs/guides/resume.md.

set -u
experiment=${1:?usage: restart.sh EXPERIMENT OUTPUT_DIR [OVERRIDE ...]}
output_dir=${2:?usage: restart.sh EXPERIMENT OUTPUT_DIR [OVERRIDE ...]}
shift 2
record=$output_dir/last_failure.json
launch=(realign)
[ -z "${RANKS:-}" ] || launch=(torchrun --nproc-per-node "$RANKS" -m realign)

recorded() { # value of a number in last_failure.json; empty without one
    sed -n "s/.*\"$1\": *\([0-9][0-9]*\).*/\1/p" "$record" 2>/dev/null
}

trap 'exit 130' INT # torchrun exits with 1 after a signal, which must not restart the run
trap 'exit 143' TERM
unrecorded=0 # failures that left no last_failure.json
while true; do
    before=$(cat "$record" 2>/dev/null)
    "${launch[@]}" experiment="$experiment" output_dir="$output_dir" resume=auto "$@"
    code=$?
    count=$(recorded count)
    if [ -n "${RANKS:-}" ] && [ "$code" -eq 1 ]; then
        if [ "$(cat "$record" 2>/dev/null)" != "$before" ]; then
            code=$(recorded exit_code)
        else # no rank lived long enough to write the record
            code=75 count=
        fi
    fi
    [ "$code" -eq 75 ] || exit "$code"
    [ -n "$count" ] || count=$((++unrecorded))
    if [ "$count" -ge 3 ]; then
        echo "$count consecutive failures without progress, see $record; no further restart" >&2
        exit "$code"
    fi
    echo "exit code 75: restart in ${RESTART_DELAY_S:-30} s" >&2
    sleep "${RESTART_DELAY_S:-30}"
done
