# Functions of prepare_run.sh and stop_run.sh, to find what runs and to end it.

# A run is all of its session: a process that it left behind still holds the TPU.
alive() {
    ps -o stat= -s "$1" | grep -q "^[^Z]"
}

# running FILE: sets pid, and whether the run with this file of its process is in progress.
running() {
    [ -f "$1" ] && read -r pid <"$1" && alive "$pid"
}

# end_run PID SECONDS: asks the run to end, and kills it when the seconds are over.
end_run() {
    pkill -TERM -s "$1" || true
    for _ in $(seq $((10 * $2))); do
        alive "$1" || break
        sleep 0.1
    done
    pkill -KILL -s "$1" || true
}
