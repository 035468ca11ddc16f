#!/usr/bin/env bash
# Installs the wheel in a fresh environment, away from the checkout, does there what the first
# tutorial says, and checks the types of a script that uses the public API.
#
#     scripts/check_wheel.sh [WHEEL]     # without a wheel, one is built from the tree
#
# With ONCE=1 it leaves out the types, and what of the tutorial trains again. PYTHON names
# another interpreter than python3.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/environment"
source "$scratch/environment/bin/activate"

if [[ $# -gt 0 ]]; then
    wheel=$1
else
    pip wheel -q --no-deps --wheel-dir "$scratch/dist" "$root"
    wheel=$(echo "$scratch"/dist/*.whl)
fi
# Of what is installed, little is imported: the rest need not be compiled.
pip install -q --no-compile "$wheel"

# All that a reader of the tutorial has: the page, and the example to copy.
mkdir -p "$scratch/work/examples"
cp "$root/docs/tutorials/first_run.md" "$root/scripts/first_tutorial.py" \
    "$root/tests/typing/public_api.py" "$scratch/work"
cp "$root/examples/gsm8k.py" "$scratch/work/examples"
cd "$scratch/work"
export JAX_COMPILATION_CACHE_DIR=$scratch/cache
export XLA_FLAGS=--xla_backend_optimization_level=0 # most of the time is compilation

python - <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import grpo_eqx

package = Path(grpo_eqx.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not in the environment"
for name in ("py.typed", "settings/unknown_names.yaml"):
    assert (package / name).is_file(), f"the wheel lacks {name}"
assert grpo_eqx.__version__ == version("grpo_eqx"), "versions differ"
print("grpo_eqx", grpo_eqx.__version__, "in", package)
PYTHON
python first_tutorial.py first_run.md ${ONCE:+--once}
echo "the tutorial is done (after $SECONDS s)"
grpo-eqx report runs/tiny_qwen2-word_problems-seed0 >/dev/null

if [[ -z ${ONCE:-} ]]; then
    pip install -q --no-compile "mypy>=1.15"
    mypy --strict public_api.py
fi
echo "the wheel works (after $SECONDS s)"
