"""Texts from outside cannot steer a terminal, in whatever way they reach it."""

import ast
import io
import json
import os
import pty
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.console import ConsoleRenderable, RenderHook
from rich.control import Control
from rich.table import Table
from rich.text import Text

from grpo_eqx.cli.main import main
from grpo_eqx.common.clean_text import clean, print_clean, spelled
from grpo_eqx.common.errors import FileError, RunError, UserError
from grpo_eqx.settings.files import read_settings
from grpo_eqx.tracking.dashboard import Dashboard
from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.safe_console import safe_console

HOSTILE = "a\x1b[2Jb\x1b]0;title\x07\r\x9bc\u202ed\ud800 [red]é"
ODD = HOSTILE[:-9].replace("\r", "\x7f\x85\u2066\u200b\u2028\ufeff\U000e0041") + "\udc80"
"""The same with more that is not printable, as paths and flags may have it."""
VM = "--name", "n", "--zone", "us-east5-b", "--type", "v4-8"
PACKAGE = Path(__file__).parents[2] / "grpo_eqx"
SHOWN = r"a\x1b[2Jb\x1b]0;title\x07\r\x9bc\u202ed\ud800 [red]é"


def test_what_cannot_be_printed_is_spelled() -> None:
    assert clean(HOSTILE) == SHOWN
    assert clean("two\nlines") == "two\nlines"
    assert clean("é", "ascii") == r"\xe9"
    assert clean("a\tb\xa0", "ascii") == "a\tb\\xa0"


def test_what_steers_nothing_stays() -> None:
    spaces = "".join(chr(n) for n in range(sys.maxunicode) if unicodedata.category(chr(n)) == "Zs")
    for text in (f"a\tb{spaces}c", "\U0001f469\u200d\U0001f52c \u2764\ufe0f"):
        assert clean(text) == text
    for steers in "\r\v\f\x1c\x85\u200b\u200e\u2028\u2029\u202a\u2060\ufeff":
        assert clean(f"a{steers}") == f"a{spelled(steers)}"


class _OnlyWrites:
    """Stream of a user's own, of the encoding that it says."""

    def __init__(self, encoding: object = None) -> None:
        self.encoding, self.text = encoding, ""

    def write(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize(
    "encoding", [None, "", "binary", "hex", "a\0b", b"utf-8", 8, "UTF-8", []], ids=repr
)
def test_streams_of_the_users_own_may_be_of_any_encoding_and_only_write(
    encoding: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _OnlyWrites(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    print_clean(HOSTILE)
    assert stream.text == f"{SHOWN}\n"
    del stream.encoding
    print_clean("é")
    assert stream.text == f"{SHOWN}\né\n"


def test_streams_that_can_are_flushed() -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="utf-8")
    print_clean("é", file=stream)
    assert raw.getvalue().decode() == "é\n"


@pytest.mark.parametrize("kind", [UserError, RunError, FileError])
def test_errors_are_clean(kind: type[Exception]) -> None:
    assert str(kind(HOSTILE)) == SHOWN


def test_consoles_are_clean() -> None:
    hostile, shown = (
        text.replace(bell, "").replace(back, "")
        for text, bell, back in [(HOSTILE, "\x07", "\r"), (SHOWN, r"\x07", r"\r")]
    )  # which rich removes
    table = Table()
    table.add_column("x", no_wrap=True)
    table.add_row(hostile)
    out = io.StringIO()
    console = safe_console(file=out, width=200)
    for each in (hostile, Text(hostile), table):
        console.print(each)
    assert out.getvalue().count(shown) == 3
    assert all(char.isprintable() or char == "\n" for char in out.getvalue())


def is_safe(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize(
    "words",
    [
        [ODD],
        ["train", f"--{ODD}", "1"],
        ["train", "--data", ODD],
        ["train", "--config", ODD],
        ["train", "--model", ODD],
        ["train", "--print-config", "--system-prompt", ODD],
        ["train", "--print-config", "--output-dir", ODD],
        ["train", "--help", ODD],
        ["plan", "--print-config", "--stop-strings", ODD],
        ["plan", "--topology", ODD],
        ["compile", "--data", ODD],
        ["eval", "--model", ODD, "--data", ODD],
        ["export", ODD, ODD],
        ["check", ODD],
        ["inspect", ODD],
        ["report", ODD],
        ["doctor", "--output-dir", ODD],
        ["launch", ODD],
        ["launch", "local", "--", ODD],
        ["launch", "slurm", "--", "echo", ODD],
        ["launch", "gke", "--", "echo", ODD],
        ["launch", "skypilot", "--", "echo", ODD],
        [
            *["launch", "tpu-vm", "run", "--name", "n", "--zone", "us-east5-b", "--type", "v4-8"],
            "--dry-run",
            "--",
            ODD,
        ],
    ],
    ids=lambda words: "-".join(words).replace(ODD, "ODD"),
)
def test_no_command_lets_it_through(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", *words])
    with pytest.raises(SystemExit):
        main()
    said = "".join(capsys.readouterr())
    assert said.strip()
    assert is_safe(said), said
    assert "Traceback" not in said


def test_printed_settings_read_as_they_were(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompt = ODD.removesuffix("\udc80")
    words = ["train", "--print-config", "--system-prompt", prompt]
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", *words])
    with pytest.raises(SystemExit):
        main()
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert read_settings(tmp_path / "run.yaml")["system_prompt"] == prompt


def test_printed_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(map(chr, range(0x300))) + HOSTILE
    print_clean(json.dumps(text))
    assert json.loads(capsys.readouterr().out) == text


def test_a_launcher_forwards_only_clean_lines_to_a_terminal() -> None:
    ours, theirs = pty.openpty()
    script = r"printf 'a\033[2Jb\302\233\342\200\256c\377 10%%\r2\t0%%\r\n\033]0;t\007'"
    command = [sys.executable, "-m", "grpo_eqx", "launch", "local", "--processes", "1"]
    subprocess.run(
        [*command, "--", "bash", "-c", f"{script}; {script} >&2"],
        stdout=theirs, stderr=theirs, check=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the end, on Linux
        pass
    os.close(ours)
    lines = shown.decode().replace("\r\n", "\n").splitlines()
    assert sorted(lines) == ["[0] 2       0%"] * 2 + [r"[0] \x1b]0;t\x07"] * 2


def test_what_libraries_say_is_clean() -> None:
    code = f"""
import logging, sys, warnings
from grpo_eqx.cli import main
def say(arguments):
    logging.getLogger("x").warning("%s", {HOSTILE!r})
    warnings.warn({HOSTILE!r})
    raise ValueError({HOSTILE!r})
main.run = say
main.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.count(SHOWN) == 3
    assert is_safe(done.stderr)
    assert done.returncode == 1


def test_what_others_installed_goes_on() -> None:
    """Factories of log records, of before and of later, and a hook for errors."""
    code = f"""
import logging, pickle, sys
from logging import LogRecord
class Record(LogRecord):
    def getMessage(self):
        return self.trace + super().getMessage()
def made(trace):
    def make(*of, **options):
        record = Record(*of, **options)
        record.trace = trace
        return record
    return make
class Handler(logging.Handler):
    def emit(self, record):
        record = pickle.loads(pickle.dumps(record))  # as into another process
        print(self.format(record))
logging.setLogRecordFactory(made("first "))
logging.getLogger().addHandler(Handler())
sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__)
from grpo_eqx.cli import main
def say(arguments):
    logging.warning("%s", {HOSTILE!r})
    logging.setLogRecordFactory(made("second "))
    logging.warning("%s", {HOSTILE!r})
    raise KeyError
main.run = say
try:
    main.main()
finally:
    assert logging.getLogRecordFactory()(*[None] * 7).trace == "second "
    assert LogRecord("", 0, "", 0, {HOSTILE!r}, (), None).getMessage() == {HOSTILE!r}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"first {SHOWN}\nsecond {SHOWN}\nhook KeyError\n"
    assert (done.returncode, done.stderr) == (1, "")


def test_a_hook_that_is_set_after_the_import_stays() -> None:
    code = """
import sys
from grpo_eqx.cli import main
earlier = sys.excepthook
def hook(kind, error, trace):
    print("hook", kind.__name__)
    earlier(kind, error, trace)
sys.excepthook = hook
def fail(arguments):
    raise KeyError("x")
main.run = fail
main.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "hook KeyError\n"
    assert done.stderr.count("Traceback") == 1


ALLOWED = {"clean_text.py", "run_console.py"}


def test_nothing_is_printed_past_the_two_places_that_clean() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and path.name not in ALLOWED and is_raw(node):
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "use print_clean, safe_console, or clean the text of a warning"


def is_raw(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "warnings.warn":
        return not ast.unparse(call.args[0]).startswith("clean(")
    streams = "sys.stdout.write", "sys.stderr.write", "sys.__stderr__.write"
    tracebacks = "traceback.print_exc", "traceback.print_exception", "traceback.print_stack"
    return name in {"print", "Console", "rich.print", *streams, *tracebacks}


def test_live_lines_are_clean_and_redrawing_them_prints_nothing_else() -> None:
    (*_, line) = _lines_during(HOSTILE)
    assert is_safe(line)
    console, hook = safe_console(file=io.StringIO()), _Seen()
    console.push_render_hook(hook)
    console.print(Control())
    assert [type(each) for each in hook.seen] == [Control]


def _lines_during(text: str) -> list[str]:
    with PHASES.lasting(Phase(text)):
        return [line.plain for line in Dashboard(10, 0, []).lines(80)]


class _Seen(RenderHook):
    def __init__(self) -> None:
        self.seen: list[ConsoleRenderable] = []

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        self.seen += renderables
        return renderables
