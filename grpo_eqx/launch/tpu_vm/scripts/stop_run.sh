# stop_run.sh: ends what runs here, and says how it ended.
set -eu
cd "$HOME/grpo-eqx" 2>/dev/null || {
    echo "this worker is not set up: run bootstrap first" >&2
    exit 3
}
found=no
for folder in runs/*; do
    running "$folder" || continue
    found=yes
    end_run "$pid"
    if [ -f "$folder/exit" ]; then
        echo "run $(basename "$folder") ended with exit code $(cat "$folder/exit")"
    else
        echo "run $(basename "$folder") was killed"
    fi
done
[ "$found" = yes ] || echo "no run is in progress"
