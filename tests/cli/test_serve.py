"""The command `grpo-eqx serve`."""

import signal
import socket
import subprocess
import sys

import openai
import pytest

from grpo_eqx.cli.main import main


@pytest.fixture
def complain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Runs the command with flags that it refuses, and returns what it says."""

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    monkeypatch.delenv("GRPO_EQX_API_KEY", raising=False)
    return said


def test_mistakes_are_one_sentence(complain: object) -> None:
    assert callable(complain)
    said = complain("tiny_qwen2", "--host", "0.0.0.0")
    assert "there is no API key: set the environment variable GRPO_EQX_API_KEY" in said
    said = complain("tiny_qwen2", "--max-model-len", "5000")
    assert "max_model_len is 5000: the model has 2 to 2048 positions" in said
    assert "no_such_model" in complain("./no_such_model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = complain("tiny_qwen2", "--port", str(port), "--max-model-len", "64")
    assert f"cannot listen at 127.0.0.1 port {port} (" in said
    assert "use another --port" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_served_model_answers_until_it_is_told_to_end(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "grpo_eqx", "serve", "tiny_qwen2", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if " is at " in line).split()[3]
        client = openai.OpenAI(base_url=address.rstrip(","), api_key="any", max_retries=0)
        made = client.chat.completions.create(
            model="tiny_qwen2", messages=[{"role": "user", "content": "1 + 1?"}], max_tokens=20
        )
        assert made.usage is not None
        assert made.usage.completion_tokens > 0
        process.send_signal(number)
        assert process.wait(60) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
