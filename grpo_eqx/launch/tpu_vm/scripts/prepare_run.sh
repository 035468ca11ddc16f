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
for folder in runs/*; do
    running "$folder" || continue
    name=$(basename "$folder")
    if [ "$replace" = no ]; then
        echo "run $name is in progress (process $pid): wait for it, or end it with --replace" >&2
        exit 3
    fi
    end_run "$pid"
done
