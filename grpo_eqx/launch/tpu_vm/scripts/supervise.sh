# supervise.sh RUN PROCESSES COMMAND...: runs the command and keeps its exit code.
folder=$HOME/grpo-eqx/runs/$1
export GRPO_EQX_REQUIRE_PROCESSES=$2
shift 2
export PATH="$HOME/grpo-eqx/venv/bin:$PATH" PYTHONUNBUFFERED=1
cd "$HOME/grpo-eqx/repo" || exit
trap : TERM INT # the command gets it too, and its exit code is to be kept
(exec -- "$@")
echo $? >"$folder/exit.new"
mv "$folder/exit.new" "$folder/exit"
