#!/bin/bash
# Train on one machine, and restart the run after failures that a restart fixes (exit code 75).
#
#     examples/restart.sh EXPERIMENT OUTPUT_DIR [OVERRIDE ...]
#
# Stops on every other exit code, and after 3 consecutive failures at the same step. RESTART_DELAY_S (default: 30)
# is the number of seconds between a failure and the restart. Exit codes: docs/guides/resume.md.

set -u
experiment=${1:?usage: restart.sh EXPERIMENT OUTPUT_DIR [OVERRIDE ...]}
output_dir=${2:?usage: restart.sh EXPERIMENT OUTPUT_DIR [OVERRIDE ...]}
shift 2

unrecorded=0 # failures that left no last_failure.json
while true; do
    realign experiment="$experiment" output_dir="$output_dir" resume=auto "$@"
    code=$?
    [ "$code" -eq 75 ] || exit "$code"
    count=$(sed -n 's/.*"count": *\([0-9][0-9]*\).*/\1/p' "$output_dir/last_failure.json" 2>/dev/null)
    [ -n "$count" ] || count=$((++unrecorded))
    if [ "$count" -ge 3 ]; then
        echo "$count consecutive failures without progress, see $output_dir/last_failure.json; no further restart" >&2
        exit "$code"
    fi
    echo "exit code 75: restart in ${RESTART_DELAY_S:-30} s" >&2
    sleep "${RESTART_DELAY_S:-30}"
done
