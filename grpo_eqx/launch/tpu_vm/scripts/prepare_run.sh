# prepare_run.sh RUN REPLACE: whether a run can start here. REPLACE is yes or no: whether to end one
# that is running.
set -eu
run=$1 replace=$2
cd "$HOME/grpo-eqx" 2>/dev/null && [ -x venv/bin/python ] && [ -d repo ] || {
    echo "this worker is not set up: run bootstrap first" >&2
    exit 3
}
if [ -e "runs/$run" ]; then
    echo "run $run already exists: choose another --run-name" >&2
    exit 3
fi
# A run is all of its session: a process that it left behind still holds the TPU.
alive() {
    ps -o stat= -s "$1" | grep -q "^[^Z]"
}
for file in runs/*/pid; do
    [ -f "$file" ] || continue
    read -r pid <"$file"
    alive "$pid" || continue
    name=$(basename "$(dirname "$file")")
    if [ "$replace" = no ]; then
        echo "run $name is in progress (process $pid): wait for it, or end it with --replace" >&2
        exit 3
    fi
    pkill -TERM -s "$pid" || true
    for _ in $(seq 100); do
        alive "$pid" || break
        sleep 0.1
    done
    pkill -KILL -s "$pid" || true
done
