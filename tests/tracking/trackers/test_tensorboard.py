"""TensorBoard's files, as its own reader reads them."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_eqx.tracking import TensorBoardTracker


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_metrics_keep_their_names_steps_and_values(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "of a: run", 0)
    tracker.log(0, {"eval/greedy/pass@1": 0.25})
    tracker.log(1, {"reward": 0.5, "rewards/correct/mean": 0.75})
    tracker.log(2, {"reward": math.nan, "rewards/correct/mean": 1.0})
    tracker.finish()
    folder = tmp_path / "of a: run"
    assert set(read(folder).Tags()["scalars"]) == {
        "eval/greedy/pass@1", "reward", "rewards/correct/mean"
    }  # fmt: skip
    assert points(folder, "eval/greedy/pass@1") == [(0, 0.25)]
    assert points(folder, "rewards/correct/mean") == [(1, 0.75), (2, 1.0)]
    assert points(folder, "reward")[0] == (1, 0.5)
    assert math.isnan(points(folder, "reward")[1][1])


def test_a_step_can_be_read_before_the_run_ends(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    tracker.log(1, {"reward": 0.5})
    assert points(tmp_path, "reward") == [(1, 0.5)]
    tracker.finish()


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    """Step 3 was made, but not saved, before the process was killed, and is made again."""
    killed = TensorBoardTracker(tmp_path, 0)
    killed.log(0, {"eval/greedy/pass@1": 0.25})
    for step in (1, 2, 3):
        killed.log(step, {"reward": 0.5})
    resumed = TensorBoardTracker(tmp_path, 2)
    for step in (3, 4):
        resumed.log(step, {"reward": 0.75})
    resumed.finish()
    late = TensorBoardTracker(tmp_path, 4)  # an evaluation after the end
    late.log(4, {"eval/greedy/pass@1": 0.5})
    late.finish()
    killed.finish()
    assert points(tmp_path, "reward") == [(1, 0.5), (2, 0.5), (3, 0.75), (4, 0.75)]
    assert points(tmp_path, "eval/greedy/pass@1") == [(0, 0.25), (4, 0.5)]


def test_a_file_that_ends_within_an_event_is_read_up_to_it(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    tracker.log(1, {"reward": 0.5})
    tracker.log(2, {"reward": 0.5})
    tracker.finish()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    resumed = TensorBoardTracker(tmp_path, 1)
    resumed.log(2, {"reward": 0.75})
    resumed.finish()
    assert points(tmp_path, "reward") == [(1, 0.5), (2, 0.75)]


def test_completions_of_the_first_prompt_are_shown_as_they_are(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    table = {
        "prompt": ["1 + 1?"] * 2 + ["2 + 2?"],
        "completion": ["# 2\n\n<b>", "3", "4"],
        "reward": [1.0, math.nan, 1.0],
        "length": [5, 2, 2],
    }
    tracker.completions(10, table)
    tracker.finish()
    accumulator = read(tmp_path)
    (tag,) = accumulator.Tags()["tensors"]
    (event,) = accumulator.Tensors(tag)
    (text,) = event.tensor_proto.string_val
    assert (tag, event.step) == ("completions/text_summary", 10)
    assert text.decode() == (
        "    1 + 1?\n\n**reward 1**, 5 tokens\n\n    # 2\n    \n    <b>\n\n"
        "**reward nan**, 2 tokens\n\n    3"
    )


def test_a_disk_that_is_full_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker._writer, "write", full)
    with pytest.raises(OSError, match="No space left"):
        tracker.log(1, {"reward": 0.5})
    tracker.finish()
