# The variables of the synced environment file, as they are: values are no shell code.
cd "$HOME/grpo-eqx"
if [ -f env ]; then
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in [A-Za-z_]*=*) export "$line" ;; esac
    done <env
fi
