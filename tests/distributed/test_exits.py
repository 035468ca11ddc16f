"""Exits that end a process at once."""

import subprocess
import sys


def test_last_acts_come_before_the_end_once_and_whatever_they_raise() -> None:
    code = """
from grpo_eqx.distributed.exits import do_last_acts, exit_at_once, last_act
say = lambda text: lambda: print(text, flush=True)
def fails(): raise ValueError
with last_act(say("outer")), last_act(fails):
    with last_act(say("left")):
        pass
    do_last_acts()
    exit_at_once(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "outer\n", "")
