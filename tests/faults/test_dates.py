"""A run whose prompts have the date is one run: on the next day, and on hosts that disagree."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.models.pretrained import model_folder

from .conftest import Command, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.grid("dates")]

MOVED_CLOCK = Path(__file__).with_name("moved_clock.py")
TIMES = "Today: {{ strftime_now('%A %d %b %Y %H:%M:%S.%f') }} {{ range(9) | random }}\n"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """The model's chat template, with the time, and a number drawn at random."""
    own = (model_folder("tiny_qwen2") / "chat_template.jinja").read_text()
    path = tmp_path / "dated.jinja"
    path.write_text(TIMES + own)
    return path


def dated(small_model: Path, programs: Path, folder: Path, *, day: int, **flags: Any) -> Command:
    """A run on a day, counted from today."""
    command = Command(small_model, programs, folder, **{"steps": 6, "eval_problems": 8, **flags})
    command.arguments = [sys.executable, "-W", "ignore", str(MOVED_CLOCK), *command.arguments[5:]]
    command.environment |= {"CLOCK_DAYS": str(day)}
    return command


def said(output: str) -> list[str]:
    return re.findall("the chat template asks for the time, which is (.*?) in all prompts", output)


def test_resumed_on_other_days_it_is_the_unbroken_run(
    small_model: Path, programs: Path, tmp_path: Path, template: Path
) -> None:
    first = dated(small_model, programs, tmp_path / "run", day=0, chat_template=template)
    process = first.start()
    wait_for_step(first, process, 3)
    first.kill(process)
    shutil.copytree(first.folder, tmp_path / "other")
    outputs = []
    for day, folder in ((1, "run"), (-1, "other")):
        resumed = dated(small_model, programs, tmp_path / folder, day=day, chat_template=template)
        outputs.append(resumed.finish())
        assert "resuming from" in outputs[-1]
    one, other = map(said, outputs)
    assert one == other
    assert len(one) == 1
    assert first.rows() == resumed.rows()
    assert first.tables() == resumed.tables()
    assert first.model() == resumed.model()
    evaluated = dated(small_model, programs, tmp_path / "unused", day=9)
    results = tmp_path / "results.json"
    evaluated.arguments[4:] = ["eval", "--model", str(first.folder), "--output", str(results)]
    assert said(evaluated.finish()) == one


def test_hosts_on_two_days_agree(
    small_model: Path, programs: Path, tmp_path: Path, template: Path
) -> None:
    command = dated(small_model, programs, tmp_path / "run", day=0, steps=1, chat_template=template)
    hosts = command.start_hosts([], [], number=2)
    outputs = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert said(outputs[0])


def test_a_template_without_the_time_says_nothing_of_it(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    assert not said(dated(small_model, programs, tmp_path / "run", day=0, steps=1).finish())
