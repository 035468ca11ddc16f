"""The newest checkpoint that can be read is used, whatever is wrong with those after it."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import pytest

from grpo_eqx import GRPOConfig, UserError
from grpo_eqx.checkpoint import store
from grpo_eqx.checkpoint.checkpoints import Checkpoints
from grpo_eqx.checkpoint.preemption import StopRequest
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import complete_steps
from grpo_eqx.common.errors import RunError
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.training.state import TrainState

CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
STATE = TrainState(Qwen2.init(CONFIG, jax.random.key(0)), opt_state=())
WHOLE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
LIKE = jax.tree.map(
    lambda x: x if isinstance(x, int) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=WHOLE),
    STATE,
)


class Run:
    """A run of ten steps in a folder, which saves each of those that it is told to."""

    def __init__(self, folder: Path):
        cfg = GRPOConfig(output_dir=folder, steps=10, save_steps=1).resolved()
        self.said = list[str]()
        self.checkpoints = Checkpoints(
            cfg, RunFacts.of(cfg, {}, {}, {}), StopRequest(1.0, print), self.said.append, 0.0
        )

    def save(self, *steps: int) -> list[Path | None]:
        """Returns what was saved after each step."""
        saved = []
        with self.checkpoints:
            for step in steps:
                self.checkpoints.are_due(step)
                state = eqx.tree_at(lambda state: state.step, STATE, step)
                saved.append(self.checkpoints.after_step(state, {}))
        return saved

    def resume(self) -> int:
        """Returns the step after which the run is resumed."""
        found = self.checkpoints.find()
        assert found is not None
        self.checkpoints.check(found, LIKE)
        return self.checkpoints.restore(found, LIKE).step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with checkpoints after steps 3 and 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    Run(folder).save(3, 4)
    return folder


def facts(folder: Path) -> Path:
    return folder / "checkpoints" / "step_4" / "facts" / "metadata"


def without_facts(folder: Path) -> None:
    shutil.rmtree(facts(folder).parent)


def with_a_folder_in_place_of_facts(folder: Path) -> None:
    facts(folder).unlink()
    facts(folder).mkdir()


def without_arrays(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "step_4" / "state")


def empty(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "step_4")
    (folder / "checkpoints" / "step_4").mkdir()


def with_facts(content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        facts(folder).write_bytes(content)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        without_facts, with_a_folder_in_place_of_facts, without_arrays, empty,
        *map(with_facts, (b"", b"\0\0", b"\xff", b"[]", b"{}", b'{"facts": 1}', b"[" * 100_000,
                          b'{"facts": {}, "sha256": ""}', b"1" * 5000)),
    ],
)  # fmt: skip
def test_a_damaged_one_is_named_and_moved_and_the_one_before_it_used(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    run = Run(folder)
    assert run.resume() == 3
    assert f"warning: cannot read the checkpoint {folder}/checkpoints/step_4: " in run.said[0]
    assert "\n" not in "".join(run.said)
    assert (folder / "previous-1" / "checkpoints" / "step_4").is_dir()
    assert run.save(4)[0] == folder / "checkpoints" / "step_4"


@pytest.mark.parametrize(
    "put", [Path.touch, os.mkfifo, lambda path: path.symlink_to(path), lambda path: None]
)
def test_what_is_in_place_of_a_checkpoint_is_moved(
    folder: Path, put: Callable[[Path], None]
) -> None:
    shutil.rmtree(folder / "checkpoints" / "step_4")
    put(folder / "checkpoints" / "step_4")
    run = Run(folder)
    assert run.resume() == 3
    assert run.save(4, 5)[0] == folder / "checkpoints" / "step_4"
    assert Run(folder).resume() == 5


@pytest.mark.parametrize("in_the_way", ["file", "folder", "link"])
def test_what_is_in_the_way_of_moving_it_stays(folder: Path, in_the_way: str) -> None:
    taken = folder / "previous-1"
    make = {"file": taken.touch, "folder": taken.mkdir, "link": lambda: taken.symlink_to("gone")}
    make[in_the_way]()
    without_facts(folder)
    assert Run(folder).resume() == 3
    assert (folder / "previous-2" / "checkpoints" / "step_4").is_dir()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EBUSY, errno.ENOSPC])
@pytest.mark.parametrize("call", ["rename", "mkdir"])
def test_one_that_cannot_be_moved_is_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def fail(*arguments: object, **others: object) -> None:
        raise OSError(number, os.strerror(number))

    without_facts(folder)
    run = Run(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        assert run.resume() == 3
    assert run.said[-1] == (
        f"warning: the checkpoints after it (step_4) cannot be moved out of "
        f"'{folder}/checkpoints' ({os.strerror(number)}): they stay, and none is saved up to step 4"
    )
    saved = [None, *(folder / "checkpoints" / f"step_{x}" for x in (5, 6, 7))]
    assert run.save(4, 5, 6, 7) == saved
    assert complete_steps(folder / "checkpoints") == [7, 6, 5, 4]  # it cannot be deleted either
    assert Run(folder).resume() == 7


def test_one_that_cannot_be_written_leaves_those_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although they would be deleted if it were complete."""

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    before = complete_steps(folder / "checkpoints")
    run = Run(folder)
    run.resume()
    monkeypatch.setattr(store, "sync_tree", full)
    with pytest.raises(RunError, match="no space is left there"):
        run.save(5)
    assert complete_steps(folder / "checkpoints") == before


@pytest.mark.parametrize("spoil", [without_facts, empty, lambda folder: None])
def test_one_that_can_never_be_deleted_ends_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    """In the run that finds it, in those after it, and whether it is damaged or only old."""

    def refusing(call: Callable[..., object]) -> Callable[..., object]:
        def refuse(path: str | Path, *arguments: object, **others: object) -> object:
            if Path(path).name == "step_4":
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            return call(path, *arguments, **others)

        return refuse

    spoil(folder)
    monkeypatch.setattr(Path, "rename", refusing(Path.rename))
    monkeypatch.setattr(os, "rmdir", refusing(os.rmdir))
    Run(folder).resume()
    for steps in (5, 6, 7), (8,), (9, 10):
        run = Run(folder)
        run.resume()
        run.save(*steps)
        assert sum("cannot be deleted" in text for text in run.said) <= 1
        assert {steps[-1], steps[-1] - 1, 4} <= {*complete_steps(folder / "checkpoints")}
    assert complete_steps(folder / "checkpoints") == [10, 9, 4]
    assert run.said[-1] == (
        f"warning: the checkpoint {folder}/checkpoints/step_4 cannot be deleted (Operation not "
        f"permitted): it stays, and the run goes on"
    )


def test_where_none_can_be_read_nothing_starts(folder: Path) -> None:
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}" / "facts")
    with pytest.raises(UserError, match="none of the 2 checkpoints in"):
        Run(folder).resume()
    assert complete_steps(folder / "checkpoints") == [4, 3]


@pytest.mark.parametrize("target", ["/of/a/disk/that/is/not/mounted", "checkpoints", ""])
def test_what_is_no_folder_of_checkpoints_is_not_put_aside(folder: Path, target: str) -> None:
    path = folder / "checkpoints"
    path.rename(folder / "elsewhere")
    path.symlink_to(target) if target else path.touch()
    with pytest.raises(UserError, match="is not a folder, or is a link to none: restore it"):
        Run(folder).checkpoints.find()
    assert os.path.lexists(path)


def test_where_none_is_left_the_steps_that_were_recorded_are_said(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    run = Run(folder)
    assert run.checkpoints.find() is None
    assert run.said == []  # nothing was recorded
    (folder / "metrics.jsonl").write_text('{"step": 4, "step_time": 1.0}\noops\n')
    assert run.checkpoints.find() is None
    assert "recorded 4 steps and has no checkpoint: it starts again at step 0" in run.said[0]
    (folder / "model").mkdir()
    with pytest.raises(UserError, match="is finished, after 4 steps, and none of its checkpoints"):
        run.checkpoints.find()


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its files and folders; then its name, before the run goes on from it."""
    synced, sync = list[tuple[Path, bool]](), os.fsync
    step = tmp_path / "checkpoints" / "step_3"

    def recorded(descriptor: int) -> None:
        sync(descriptor)
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), step.exists()))

    monkeypatch.setattr(os, "fsync", recorded)
    Run(tmp_path).save(3)
    unnamed = [path for path, has_name in synced if not has_name and path.is_relative_to(tmp_path)]
    folder = next(path for path in unnamed if path.parent == step.parent)
    assert folder.name.startswith("step_3.")
    before = {path.relative_to(folder) for path in unnamed if path.is_relative_to(folder)}
    assert {path.relative_to(step) for path in step.rglob("*")} - before == {
        Path("commit_success.txt")
    }
    assert synced[-1] == (step.parent, True)
