# bootstrap.sh URL COMMIT: a virtual environment with the repository at that commit, whose hash is
# the last line of output. The image's own Python may be too old, so uv brings one.
set -euo pipefail
url=$1 commit=$2
export GIT_TERMINAL_PROMPT=0
[ -x uv/bin/uv ] || python3 -m pip install --quiet --upgrade --target uv uv
[ -x venv/bin/python ] || uv/bin/uv venv --quiet --python 3.12 venv
[ -d repo/.git ] || git clone --quiet --no-checkout -- "$url" repo
git -C repo remote set-url origin "$url"
git -C repo cat-file -e "$commit^{commit}" 2>/dev/null || git -C repo fetch --quiet --tags origin
git -C repo checkout --quiet --force --detach "$commit"
uv/bin/uv pip install --quiet --python venv/bin/python -e "./repo[tpu]"
git -C repo rev-parse HEAD
