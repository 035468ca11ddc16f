# Functions of prepare_run.sh and stop_run.sh, to find what runs and to end it.

# A run is all of its session: a process that it left behind still holds the TPU.
alive() {
    ps -o stat= -s "$1" | grep -q "^[^Z]"
}

# running FOLDER: reads pid; succeeds if the run of this folder is in progress.
running() {
    [ ! -L "$1" ] && [ -f "$1/pid" ] && read -r pid <"$1/pid" && alive "$pid"
}

# end_run PID: asks the run to end, and kills what is left of it after two minutes.
end_run() {
    pkill -TERM -s "$1" || true
    for _ in $(seq 1200); do
        alive "$1" || break
        sleep 0.1
    done
    pkill -KILL -s "$1" || true
}
