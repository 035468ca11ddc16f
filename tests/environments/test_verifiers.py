"""Environments of verifiers are played on the endpoint, and their rewards come back."""

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.common.errors import UserError
from grpo_eqx.data.word_problems import WordProblems
from grpo_eqx.environments import VerifiersHarness, verifiers
from grpo_eqx.environments.chat_format import ChatFormats
from grpo_eqx.environments.endpoint.app import Endpoint
from grpo_eqx.environments.endpoint.clients import Guest
from grpo_eqx.environments.endpoint.exchange import Exchange
from grpo_eqx.environments.endpoint.server import listening, served
from grpo_eqx.evaluation.served_model import ServedModel

MODEL, KEY = "tiny_qwen2", "a secret"


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    pytest.importorskip("verifiers")
    model = ServedModel(MODEL, {}, lambda line: None)
    exchange, ended = Exchange(model.session(8, 512)), threading.Event()
    thread = threading.Thread(target=exchange.run, args=(ended.is_set,))
    thread.start()
    guest = Guest(exchange.session.max_length)
    endpoint = Endpoint(
        exchange, ChatFormats(model.tokenizer), MODEL, lambda key: guest if key == KEY else None
    )
    with served(endpoint, listening("127.0.0.1", 0, "--port")) as address:
        yield SimpleNamespace(base_url=f"{address}/v1", api_key=KEY, model=MODEL)
        ended.set()
        thread.join()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an environment of settings of its agent and others."""
    vf = pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(Path(__file__).parent / "verifiers_packages")

    def make(num_tasks: int | None, agent: dict[str, Any], **more: Any) -> Any:
        taskset = {"id": "word_problem_set", "num_tasks": num_tasks}
        agent = {"runtime": {"type": "subprocess"}, "sampling": {"temperature": 0}, **agent}
        config = {"taskset": taskset, "agent": agent, **more}
        return vf.load_environment(vf.resolve_env_config(config))

    return make


async def played(harness: VerifiersHarness, server: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """Plays episodes side by side, as in a data set that went through JSON."""
    rows = json.loads(json.dumps(rows))
    return await asyncio.gather(*(harness(server, row) for row in rows), return_exceptions=True)


def greedy(server: Any, row: dict[str, Any], turns: int) -> float:
    """The reward of a row, from its first turn by OpenAI's client."""
    client = openai.OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0)
    made = client.chat.completions.create(model=MODEL, messages=row["prompt"], temperature=0)
    answer = (made.choices[0].message.content or "").splitlines()[-1:]
    return 2 * (answer == [json.loads(row["task"])["answer"]]) + 0.125 * turns


def test_rewards(server: SimpleNamespace, environment: Any) -> None:
    agent = {"harness": {"id": "word_problem_set", "turns": 2}}
    harness = VerifiersHarness(environment(6, agent))
    rows = harness.rows()
    assert rows[0]["prompt"] == [{"role": "user", "content": WordProblems()[0].content}]
    wanted = [greedy(server, row, 2) for row in rows]
    assert {*wanted} == {0.25, 2.25}
    assert asyncio.run(played(harness, server, rows)) == wanted
    wrong = SimpleNamespace(**vars(server) | {"api_key": "wrong"})

    async def with_two_keys() -> tuple[list[Any], list[Any]]:
        return await asyncio.gather(played(harness, server, rows), played(harness, wrong, rows))

    right, refused = asyncio.run(with_two_keys())  # in another event loop
    assert right == wanted
    assert all("the API key is missing or wrong" in str(error) for error in refused)


@pytest.mark.slow
def test_a_run_trains_on_them(environment: Any, tmp_path: Path) -> None:
    """The same completions as a run that is rewarded for the same by a function."""
    harness = VerifiersHarness(environment(64, {"harness": {"id": "word_problem_set"}}))

    def rewarded(completions: list[Any], task: list[str], **columns: Any) -> list[float]:
        answers = [json.loads(each)["answer"] for each in task]
        texts = [messages[0]["content"].splitlines()[-1:] for messages in completions]
        return [2 * (text == [answer]) + 0.125 for text, answer in zip(texts, answers, strict=True)]

    runs = {}
    for name, passed in {
        "played": {"harness": harness},
        "plain": {"reward_funcs": rewarded},
    }.items():
        cfg = GRPOConfig(
            steps=10, prompts_per_step=8, num_generations=4, output_dir=tmp_path / name,
            eval_problems=8,
        )  # fmt: skip
        runs[name] = GRPOTrainer(cfg, train_data=harness.rows(), **passed).fit().history
    for own, expected in zip(runs["played"], runs["plain"], strict=True):
        assert own["reward"] == expected["reward"]
        assert own["completions/mean_length"] == expected["completions/mean_length"]
        assert own["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert len(runs["played"]) == 10
    assert any(line["grad_norm"] > 0 for line in runs["played"])


@pytest.mark.parametrize("seconds", [0.01, 1.0])
def test_a_canceled_episode(server: SimpleNamespace, environment: Any, seconds: float) -> None:
    harness = VerifiersHarness(environment(1, {}))
    (row,) = harness.rows()

    async def twice() -> Any:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(harness(server, row), seconds)
        return await harness(server, row)

    assert asyncio.run(twice()) == greedy(server, row, 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="verifiers runs its programs with uv")
def test_the_program_of_verifiers(server: SimpleNamespace, environment: Any) -> None:
    """It is installed at its first use, which needs a package index."""
    harness = VerifiersHarness(environment(2, {"harness": {"id": "null"}}))
    rows = harness.rows()
    wanted = [greedy(server, row, 1) for row in rows]
    assert asyncio.run(played(harness, server, rows)) == wanted


def test_several_parts_are_refused(server: SimpleNamespace, environment: Any) -> None:
    harness = VerifiersHarness(environment(1, {}, id="best-of-n", n=2))
    (error,) = asyncio.run(played(harness, server, harness.rows()))
    assert isinstance(error, UserError)
    assert "(agent, agent)" in str(error)


def test_rows_of_an_endless_set(environment: Any) -> None:
    harness = VerifiersHarness(environment(None, {}))
    with pytest.raises(UserError, match="has no end"):
        harness.rows()
    assert len(harness.rows(20)) == 20


def test_tasks_that_json_changes(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vf = pytest.importorskip("verifiers.v1")
    from pydantic import Field

    class Hiding(vf.TaskData):  # type: ignore[misc]
        answer: int = Field(0, exclude=True)

    env = environment(1, {})
    monkeypatch.setattr(type(env.taskset), "load", lambda _: [vf.Task(Hiding(answer=3))])
    with pytest.raises(UserError, match=r"task 0 is not the same .* all fields of Hiding"):
        VerifiersHarness(env).rows()


def test_what_is_no_environment() -> None:
    pytest.importorskip("verifiers")
    with pytest.raises(UserError, match="load_environment"):
        VerifiersHarness("word_problem_set")


def test_the_version_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "version", lambda name: "0.3.1")
    with pytest.raises(UserError, match=r'0.3.1.*pip install "grpo_eqx\[verifiers\]"'):
        VerifiersHarness(None)
