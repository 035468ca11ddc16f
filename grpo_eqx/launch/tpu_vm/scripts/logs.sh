# logs.sh RUN LINES FOLLOW: the end of a run's log. FOLLOW is yes or no; following ends with the run.
set -eu
run=$1 lines=$2 follow=$3
folder=$HOME/grpo-eqx/runs/$run
if [ ! -f "$folder/log" ]; then
    echo "there is no log: no run of that name was started on this worker" >&2
    exit 3
fi
if [ "$follow" = yes ]; then
    exec tail -n "$lines" --pid="$(cat "$folder/pid")" -f "$folder/log"
fi
exec tail -n "$lines" "$folder/log"
