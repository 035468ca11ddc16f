# start_run.sh SUPERVISOR RUN PROCESSES COMMAND...: starts the run, which outlives this connection.
set -eu
umask 077
supervisor=$1 run=$2
shift
cd "$HOME/grpo-eqx"
mkdir -p runs
# gcloud tries a connection that broke again: by then the run may have started.
if [ -s "runs/$run/pid" ]; then
    exit
fi
mkdir "runs/$run"
nohup setsid bash -c "$supervisor" grpo-eqx-run "$@" >"runs/$run/log" 2>&1 </dev/null &
echo $! >"runs/$run/pid"
ln -sfn "$run" runs/latest
