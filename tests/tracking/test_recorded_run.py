"""A run that is read from its folder."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.tracking.report.reading import read_run
from grpo_eqx.tracking.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"step": 0, "eval/greedy/pass@1": 0.25},
        {"step": 1, "reward": 0.5, "step_time": 2.0},
        {"step": 2, "reward": None, "step_time": 1.0, "kl": 0.1},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "rew')
    (tmp_path / "config.json").write_text('{"run_name": null, "seed": 7}')
    (tmp_path / "completions").mkdir()
    for step in (10, 1):
        (tmp_path / "completions" / f"step_{step:06d}.parquet").touch()
    return tmp_path


def test_steps_and_evaluations_are_told_apart(folder: Path) -> None:
    run = RecordedRun.read(folder)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert run.evaluations == [{"step": 0, "eval/greedy/pass@1": 0.25}]
    assert run.settings["seed"] == 7
    assert run.name == folder.name


def test_a_value_that_was_not_finite_or_not_logged_is_nan(folder: Path) -> None:
    run = RecordedRun.read(folder)
    assert run.values("reward")[0] == 0.5
    assert math.isnan(run.values("reward")[1])
    assert math.isnan(run.values("kl")[0])


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        ('{"devices": 8}', 8),
        ('{"devices": 0}', None),
        ("{}", None),
        ("[8]", None),
        ("{", None),
        (None, None),
    ],
)
def test_devices_are_those_of_the_layout(
    folder: Path, layout: str | None, devices: int | None
) -> None:
    if layout is not None:
        (folder / "layout.json").write_text(layout)
    assert RecordedRun.read(folder).num_devices == devices


def test_damaged_lines_are_left_out_and_said(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\n\xff\n{"step": 3, "step_time": 1.0}\n{"step": 4')
    run = RecordedRun.read(folder)
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    assert run.gaps == "metrics.jsonl has 2 lines that are damaged or repeated (4 to 5)"


IN_PLACE_OF_METRICS: list[tuple[Callable[[Path], None], str]] = [
    (os.mkfifo, r"metrics\.jsonl is neither a file nor a folder: give a file"),
    (Path.mkdir, r"metrics\.jsonl is a folder: give a file"),
    (lambda path: path.symlink_to(path), r"metrics\.jsonl cannot be read: Too many levels of sym"),
    (lambda path: path.symlink_to("gone"), r"metrics\.jsonl cannot be read: No such file"),
]


@pytest.mark.parametrize(("put", "message"), IN_PLACE_OF_METRICS)
def test_what_is_in_place_of_the_metrics_is_said(
    folder: Path, put: Callable[[Path], None], message: str
) -> None:
    (folder / "metrics.jsonl").unlink()
    put(folder / "metrics.jsonl")
    for read in RecordedRun.read, read_run:
        with pytest.raises(UserError, match=f"the run in .* cannot be read: .*{message}"):
            read(folder)
    run = RunFolder(folder)
    with pytest.raises(UserError, match=message):
        run.start({}, {}, {}, continued=True)
    run.start({}, {}, {})  # another run, which keeps what it finds
    assert run.metrics.is_file()
    assert os.path.lexists(folder / "previous-1" / "metrics.jsonl")


def test_where_a_run_continues_another_it_lacks_no_earlier_steps(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 3, "step_time": 1.0}\n')
    assert RecordedRun.read(folder).gaps == "metrics.jsonl has no line of 2 of 3 steps (1 to 2)"
    (folder / "config.json").write_text('{"resume": "runs/other"}')
    assert RecordedRun.read(folder).gaps is None


def test_tables_of_completions_come_in_the_order_of_steps(folder: Path) -> None:
    assert list(RecordedRun.read(folder).completion_tables) == [1, 10]


def test_a_copy_beside_the_tables_is_none_of_them(folder: Path) -> None:
    table = folder / "completions" / "step_000001.parquet"
    table.with_name("step_000001 (1).parquet").write_bytes(table.read_bytes())
    table.with_name("step_1000000.parquet").write_bytes(table.read_bytes())
    assert list(RecordedRun.read(folder).completion_tables) == [1, 10, 1_000_000]


def test_settings_that_are_no_object_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"cannot be read: config\.json holds \[\]: exp"):
        RecordedRun.read(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", '{"steps": "many"}', r"config\.json: steps is 'many': use a whole number"),
        ("config.json", '{"steps": [3]}', r"config\.json: steps is \[3\]: use a whole number"),
        ("config.json", '{"run_name": {}}', r"config\.json: run_name is {}: use"),
        ("config.json", '{"beta": 1e999}', r"config\.json: beta is inf: it must be"),
        ("config.json", '{"beta": ' + "[" * 9000, r"config\.json is nested too deeply"),
        (
            "config.json",
            '{"steps": ' + "9" * 9000 + "}",
            r"config\.json has a whole number of more",
        ),
        ("passed.json", '{"model": 3}', r"passed\.json: model is 3: expected a text"),
        ("passed.json", "[" * 9000, r"passed\.json is nested too deeply"),
    ],
)
def test_settings_of_another_type_are_refused(
    folder: Path, file: str, content: str, message: str
) -> None:
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=f"cannot be read: {message}"):
        RecordedRun.read(folder)


@pytest.mark.parametrize("devices", ['"8"', "[]", "{}", "true", "-1", "9" * 9000, "[" * 9000])
def test_devices_of_another_type_are_unknown(folder: Path, devices: str) -> None:
    (folder / "layout.json").write_text(f'{{"devices": {devices}}}')
    assert RecordedRun.read(folder).num_devices is None


def test_another_folder_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no metrics\.jsonl"):
        RecordedRun.read(tmp_path)


def test_settings_that_cannot_be_read_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read: config\.json is not valid JSON \(Exp"):
        RecordedRun.read(folder)


def test_reading_a_run_does_not_import_jax() -> None:
    """Commands that read runs start in half a second, and beside a run that has the devices."""
    code = "import sys, grpo_eqx.tracking.recorded_run; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_is_not_a_run_is_refused_with_the_runs_nearby(folder: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UserError) as error:
            RecordedRun.read(path)
        return str(error.value)

    assert refused(folder / "absent").endswith("does not exist: name the output_dir of a run.")
    assert refused(folder / "completions").endswith(f"Runs nearby: {str(folder)!r}.")
    assert f"Runs nearby: '{folder.parent}" in refused(folder.parent)
    (folder / "completions" / "empty").mkdir()
    assert refused(folder / "completions" / "empty").endswith("Name the output_dir of a run.")
