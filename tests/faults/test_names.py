"""Names from users that no file can have, or nothing has, are refused in one sentence."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.checkpoint.checkpoints import located
from grpo_eqx.checkpoint.export import export
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.data.load import load_data, load_problems
from grpo_eqx.data.run_inputs import tokenizer_in
from grpo_eqx.evaluation.results_file import ResultsFile
from grpo_eqx.evaluation.subject import Subject
from grpo_eqx.models.hub import HubName
from grpo_eqx.models.pretrained import find_config, from_pretrained, model_folder
from grpo_eqx.settings.files import read_settings
from grpo_eqx.tracking.final_model import write_model
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.tracking.report.reading import read_run
from grpo_eqx.tracking.run_folder import RunFolder

NAMES = {
    "long": "x" * 5000,
    "long, on the hub": "owner/" + "x" * 5000,
    "long, of a file": "y" * 300 + ".jsonl",
    "long, in a folder": "./" + "x" * 300,
    "long, with a revision": "owner/name@" + "x" * 300,
    "long, a checkpoint": "x" * 300 + "/step_1",
    "many folders": "a/" * 2500,
    "home of nobody": "~nobody-at-all/x",
    "home of nobody, alone": "~nobody-at-all",
    "odd": "owner/na me?*",
    "controls": "a\x1b[31m/b",
    "accents": "é/ü",
    "only a mark": "@",
    "only a colon": ":",
    "four parts": "a/b/c/d",
    "space": " ",
}


def _save(folder: Path) -> None:
    folder.mkdir(parents=True)


def _write_results(name: str) -> None:
    with ResultsFile(Path(f"{name}.json"), {}):
        pass


READERS: dict[str, Callable[[str], object]] = {
    "data": lambda name: load_data(name, None, 1),
    "eval_data": lambda name: load_data("word_problems", name, 1),
    "eval --data": lambda name: load_problems(name, None),
    "model": model_folder,
    "model's config": find_config,
    "from_pretrained": from_pretrained,
    "eval --model": Subject.find,
    "chat_template": lambda name: tokenizer_in(model_folder("tiny_qwen2"), None, f"{name}.jinja"),
    "resume": lambda name: located("resume", Path(name)),
    "export": lambda name: export(Path(name), Path("out"), "float32", print, None, merge=False),
    "config": lambda name: read_settings(Path(name)),
    "inspect": RecordedRun.read,
    "report": lambda name: read_run(Path(name)),
}
WRITERS: dict[str, Callable[[str], object]] = {
    "output_dir": lambda name: RunFolder(Path(name)).check_start(continued=False),
    "save_pretrained": lambda name: write_model(_save, name),
    "results": _write_results,
    "resolved": lambda name: GRPOConfig(model=name, data=name).resolved().with_absolute_paths(),
}


@pytest.fixture(autouse=True)
def _in_empty_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, add_to_hub: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [*NAMES.values(), "a\0b"], ids=[*NAMES, "null"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_name_of_nothing_is_refused(read: Callable[[str], object], name: str) -> None:
    with pytest.raises(UserError):
        read(name)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_name_to_write_to_is_taken_or_refused(write: Callable[[str], object], name: str) -> None:
    with contextlib.suppress(UserError, RunError):
        write(name)


def test_a_long_name_makes_a_run_folder_of_its_own() -> None:
    """The folder's name is cut, and its hash tells what the cut name does not."""
    one, other = (GRPOConfig(data="o/" + "x" * 300 + end).resolved().output_dir for end in "ab")
    assert one != other
    RunFolder(Path(str(one))).check_start(continued=False)


def test_a_revision_of_nothing_is_named() -> None:
    with pytest.raises(UserError, match="give a branch, tag or commit after the @"):
        HubName.parse("data", "@", "word_problems")
