"""`examples/gsm8k.py` as a person runs it."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from grpo_eqx import UserError

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
SHORT = ["--steps", "2", "--eval-problems", "16", "--max-completion-length", "8"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_example", ROOT / "examples" / "gsm8k.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Run:
    """Runs the example in an empty folder; returns exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["gsm8k.py", *arguments])
        code = 0
        try:
            example.cli.run(example.main)
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.slow
def test_a_short_run_prints_accuracies_and_leaves_a_folder(run: Run, tmp_path: Path) -> None:
    fewer = ["--prompts-per-step", "8", "--num-generations", "2"]
    code, out, err = run("--mesh", "auto", "--output-dir", "out", *SHORT, *fewer)
    assert code == 0
    assert all(re.match(r"\[ *\d+ s\] ", line) for line in err.splitlines()), err  # progress
    assert re.search(r"^accuracy before: 0\.\d+ ", out, re.MULTILINE)
    assert re.search(r"^accuracy after: 0\.\d+ ", out, re.MULTILINE)
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    files = {"config.json", "layout.json", "metrics.jsonl", "learning_curve.png"}
    assert names == files | {".lock", "checkpoints", "completions", "model"}


def test_without_arguments_it_says_what_it_trains(
    run: Run, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        def __init__(self, cfg: object):
            raise UserError("stopped here")

    monkeypatch.setattr(example, "GRPOTrainer", Nothing)
    code, out, _ = run("--mesh", "auto")
    assert code == 2
    assert len(out.splitlines()) == 1
    assert "embedded model" in out
    assert "--model Qwen/Qwen2.5-3B-Instruct --data openai/gsm8k" in out


def jsonl(path: Path, *rows: str) -> str:
    path.write_text("\n".join(rows))
    return str(path)


GOOD = '{"question": "1+1?", "answer": "#### 2"}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such-model"], r"model 'no/such-model' .*could not be downloaded"),
        (["--model", "./nowhere"], r"model './nowhere' does not exist here"),
        (["--data", "nowhere.jsonl"], r"data 'nowhere.jsonl' is neither a file"),
        (["--data", "{tmp}/bad.jsonl"], r"bad\.jsonl, line 2 is not valid JSON"),
        (["--data", "{tmp}/empty.jsonl"], r"empty\.jsonl' is empty"),
        (["--data", "{tmp}/few.jsonl"], r"has 2 problems to train on, and prompts_per_step is 16"),
        (
            ["--data", "{tmp}/one.jsonl"],
            r"one\.jsonl has a single problem, which would be held out",
        ),
        (
            ["--data", "{tmp}/wordy.jsonl"],
            r"problem 1 \('1\+1\?'\).*gold answer must be one number",
        ),
        (["--num-generations", "1"], r"num_generations is 1"),
        (["--mesh", "3,1,1"], r"needs 3 devices, but 8 are available"),
        (["--max-prompt-length", "16"], r"tokens, and max_prompt_length is 16"),
        (["--output-dir", "{tmp}/few.jsonl"], r"output_dir .* cannot be written"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    jsonl(tmp_path / "bad.jsonl", GOOD, "{oops")
    jsonl(tmp_path / "empty.jsonl")
    jsonl(tmp_path / "one.jsonl", GOOD)
    jsonl(tmp_path / "wordy.jsonl", *[GOOD.replace("#### 2", "two")] * 40)
    jsonl(tmp_path / "few.jsonl", GOOD, GOOD, GOOD)
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    code, _, err = run(*filled, *SHORT)
    assert code == 2
    *progress, last = err.splitlines()
    assert all(line.startswith("[") for line in progress)
    assert last.startswith("error: ")
    assert re.search(message, last)


def test_an_unknown_flag_is_refused(run: Run) -> None:
    code, _, err = run("--num-generation", "4")
    assert code == 2
    assert err == "error: num_generation is an unknown setting: did you mean num_generations?\n"


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not beside this checkout")
def test_the_real_problems_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "gsm8k.py"), "--mesh", "auto"]
    command += ["--data", str(GSM8K), *SHORT, "--prompts-per-step", "4", "--num-generations", "2"]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "7,457 problems, 16 held out" in done.stdout
    assert "Traceback" not in done.stderr
