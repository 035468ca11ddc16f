# status.sh RUN: one line on how a run is.
set -eu
folder=$HOME/grpo-eqx/runs/$1
if [ ! -s "$folder/pid" ]; then
    echo "not started"
    exit
fi
name=$(basename "$(readlink -f "$folder")")
read -r pid <"$folder/pid"
if [ -f "$folder/exit" ]; then
    echo "exit code $(cat "$folder/exit") of run $name"
elif ps -o stat= -p "$pid" | grep -q "^[^Z]"; then
    echo "running $name, process $pid"
else
    echo "run $name ended without an exit code: it was killed, or the VM restarted"
fi
