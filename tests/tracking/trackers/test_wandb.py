"""Weights & Biases: what offline runs leave on disk, which `wandb sync` uploads as it is."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from grpo_eqx.tracking import WandbTracker, durations

_BLOCK, _HEADER = 32768, 7
TABLE = {
    "step": [2, 2],
    "prompt": ["1 + 1?", "1 + 1?"],
    "completion": ["2", "3\n| <b>"],
    "reward": [1.0, float("nan")],
    "truncated": [False, True],
}


def records(path: Path) -> Iterator[Record]:
    """Reads a `.wandb` file: LevelDB's log format, behind a header of seven bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = _HEADER, b""
    while place < len(data):
        if _BLOCK - place % _BLOCK < _HEADER:  # the rest of a block is filled up
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + _HEADER])
        parts += data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def history(found: list[Record]) -> dict[int, dict[str, Any]]:
    """The metrics of every step in a file."""
    rows: dict[int, dict[str, Any]] = {}
    for record in found:
        if record.HasField("history"):
            items = record.history.item
            values = {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}
            rows.setdefault(values["_step"], {}).update(values)
    return rows


def record(folder: Path, seed: int, steps: range, run_id: str) -> None:
    """Records steps as a run does, with an evaluation before the first and after the last."""
    folder.mkdir(exist_ok=True)
    config = {"run_name": None, "seed": seed, "layout": {"num_devices": 8}}
    tracker = WandbTracker("offline", "arithmetic", config, folder, run_id)
    if steps[0] == 1:
        tracker.log(0, {"eval/greedy/pass@1": 0.25})
    for step in steps:
        tracker.log(step, metrics(seed, step))
        if step == 2:
            tracker.completions(step, TABLE)
    tracker.log(steps[-1], {"eval/greedy/pass@1": 0.5})
    tracker.finish()


def metrics(seed: int, step: int) -> dict[str, float]:
    return {"reward": seed + step / 8, "rewards/f/mean": 0.5, "grad_norm": float("inf")}


@dataclasses.dataclass(frozen=True)
class Offline:
    """A file of an offline run, read."""

    run_id: str
    project: str
    name: str
    config: dict[str, Any]
    history: dict[int, dict[str, Any]]
    is_complete: bool
    tables: list[Any]

    @classmethod
    def read(cls, path: Path) -> "Offline":
        found = list(records(path))
        (run,) = (record.run for record in found if record.HasField("run"))
        config = {x.key: json.loads(x.value_json) for x in run.config.update}
        tables = [json.loads(x.read_text()) for x in path.parent.rglob("*.table.json")]
        last = found[-1].WhichOneof("record_type")
        return cls(
            run.run_id, run.project, run.display_name, config, history(found), last == "exit",
            tables,
        )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Offline]]:
    """Runs of two seeds, the second of which was interrupted and resumed."""
    base = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_DATA_DIR", str(base))
        record(base / "seed1", 1, range(1, 4), "bbbb1111")
        record(base / "seed0", 0, range(1, 5), "aaaa0000")
        record(base / "seed1", 1, range(3, 6), "bbbb1111")
        wandb.teardown()  # waits until all is on disk
    return {
        name: [
            Offline.read(path) for path in sorted((base / name).glob("wandb/offline-run-*/*.wandb"))
        ]
        for name in ("seed0", "seed1")
    }


@pytest.mark.slow
def test_the_files_of_two_seeds_are_complete(runs: dict[str, list[Offline]]) -> None:
    first, second = runs["seed0"][0], runs["seed1"][0]
    for seed, run, last in ((0, first, 4), (1, second, 3)):
        assert run.is_complete
        assert (run.project, run.name) == ("arithmetic", f"seed{seed}")
        assert run.config["seed"] == seed
        assert run.config["layout"] == {"num_devices": 8}
        assert list(run.history) == list(range(last + 1))
        for step in range(1, last + 1):
            assert metrics(seed, step).items() <= run.history[step].items()
        assert run.history[0]["eval/greedy/pass@1"] == 0.25
        assert run.history[last]["eval/greedy/pass@1"] == 0.5


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(runs: dict[str, list[Offline]]) -> None:
    assert len(runs["seed1"]) == 2
    before, after = runs["seed1"]
    assert before.run_id == after.run_id == "bbbb1111"
    assert runs["seed0"][0].run_id != before.run_id
    assert list(after.history) == [3, 4, 5]


@pytest.mark.slow
def test_completions_are_a_table_of_their_step(runs: dict[str, list[Offline]]) -> None:
    for run in (runs["seed0"][0], runs["seed1"][0]):
        (table,) = run.tables
        assert table["columns"] == list(TABLE)
        assert table["data"] == [
            [2, "1 + 1?", "2", 1.0, False],
            [2, "1 + 1?", "3\n| <b>", None, True],
        ]
        assert run.history[2]["completions/nrows"] == 2


class Online:
    """A run that Weights & Biases had up to step 4 already."""

    def __init__(self) -> None:
        self.step = 5
        self.rows: list[tuple[int, list[str]]] = []

    def log(self, row: dict[str, Any], step: int) -> None:
        assert step >= self.step, "Weights & Biases would drop it"
        self.step = step
        self.rows.append((step, list(row)))

    def finish(self) -> None:
        self.rows.append((self.step, ["finished"]))


def online(monkeypatch: pytest.MonkeyPatch, folder: Path, run: Online) -> WandbTracker:
    monkeypatch.setattr(wandb, "init", lambda **settings: run)
    return WandbTracker("online", "arithmetic", {"run_name": None}, folder, "bbbb1111")


def test_short_steps_send_the_tables_that_time_allows_and_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [100.0]
    run = Online()

    def make_table(**settings: Any) -> dict[str, Any]:
        clock[0] += 0.01  # for 20 s of steps
        return settings

    monkeypatch.setattr(wandb, "Table", make_table)
    monkeypatch.setattr(durations.time, "monotonic", lambda: clock[0])
    tracker = online(monkeypatch, tmp_path, run)
    for step in range(5, 15):
        tracker.completions(step, TABLE)
        clock[0] += 9.0
    tracker.finish()
    assert [step for step, _ in run.rows] == [5, 8, 11, 14, 14]
    assert run.rows[-2:] == [(14, ["completions"]), (14, ["finished"])]


def test_a_table_that_was_sent_is_not_sent_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Online()
    tracker = online(monkeypatch, tmp_path, run)
    tracker.completions(5, TABLE)
    tracker.finish()
    assert run.rows == [(5, ["completions"]), (5, ["finished"])]


def test_steps_that_are_made_again_are_not_taken_for_later_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Online()
    tracker = online(monkeypatch, tmp_path, run)
    for step in (3, 4, 5):
        tracker.log(step, metrics(1, step))
        tracker.completions(step, TABLE)
    tracker.log(5, {"eval/greedy/pass@1": 0.5})
    again = online(monkeypatch, tmp_path, run)
    run.step = 6  # of a run that goes on, the next one
    again.log(5, {"eval/temperature_1/pass@8": 0.5})
    again.log(3, {"eval/greedy/pass@1": 0.5})  # of a step that is made again
    assert run.rows == [
        (5, list(metrics(1, 5))),
        (5, ["completions"]),
        (5, ["eval/greedy/pass@1"]),
        (6, ["eval/temperature_1/pass@8"]),
    ]
