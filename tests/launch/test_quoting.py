"""Quoting: any value arrives as it is."""

import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.quoting import kubernetes_argument, shell_line, yaml_text

TEXTS = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))


@given(st.lists(TEXTS, max_size=20))
def test_yaml_reads_what_was_written(texts: list[str]) -> None:
    lines = "\n".join(f"- {yaml_text(text)}" for text in texts)
    assert lines.count("\n") == max(0, len(texts) - 1)
    assert (yaml.safe_load(lines) or []) == texts


def test_bash_reads_what_was_written_on_one_line(hostile: tuple[str, ...]) -> None:
    # Every kind of character, and bytes that are no UTF-8.
    arguments = [*hostile, "".join(map(chr, range(1, 0x180))), "\udcff\udc80", "'", "\n'", "\\\n"]
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    line = shell_line([sys.executable, "-c", show, *arguments])
    assert line.isprintable()
    for locale in ("C", "C.UTF-8"):
        environment = {"LC_ALL": locale, "PYTHONUTF8": "1"}
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, check=True, env=environment
        )
        assert json.loads(done.stdout) == arguments


def test_what_is_simple_stays_readable() -> None:
    assert (
        shell_line(["python", "a.py", "--mesh", "auto", "x y"]) == "python a.py --mesh auto 'x y'"
    )


def test_yaml_holds_no_bytes() -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        yaml_text("\udcff")


def test_kubernetes_replaces_no_variables() -> None:
    assert kubernetes_argument("$(A) $$ $x") == "$$(A) $$$$ $$x"
