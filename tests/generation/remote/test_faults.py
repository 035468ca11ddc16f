"""Servers that fail are named, and asked again, left out or refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.generation import Sampling, Stopping
from grpo_eqx.generation.remote import RemoteOptions, RemoteSampler, servers
from grpo_eqx.models.decoder import Decoder

from ..scripted_dialogues import CONFIGS, VOCAB
from .fake_engines import COMPLETES, ENGINES, LOADS, FakeEngine, Kind, Made, random_tokens, running

END, LONGEST = 3, 12


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder.init(CONFIGS["qwen2"], jax.random.key(0))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_PAUSE", 0.001)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


class Run:
    """A sampler on servers of one kind, and how it samples."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, kinds: Sequence[Kind], **options: Any
    ):
        complete = random_tokens(VOCAB, END)
        self.engines = [stack.enter_context(running(FakeEngine(kind, complete))) for kind in kinds]
        self.folder = folder
        settings: dict[str, Any] = {
            "sampling": Sampling(temperature=0.9), "max_completion_length": LONGEST, "seed": 1,
            "stopping": Stopping.of_ids([END], VOCAB), "end_ids": [END], **options,
        }  # fmt: skip
        self.sampler = RemoteSampler(
            [each.address for each in self.engines], folder, RemoteOptions(**settings)
        )
        stack.callback(self.sampler.close)

    def sample(self, number: int = 16) -> list[Trajectory]:
        begun = [Trajectory([7, 8, n % VOCAB], Address(0, n, 0)) for n in range(number)]
        return self.sampler.submit(begun).result().trajectories


def once(path: str, answer: Response) -> Any:
    """Answers the first request to a path in an engine's place."""
    left = [answer]

    async def intercept(asked: str) -> Response | None:
        return left.pop() if asked == path and left else None

    return intercept


def always(path: str, answer: Response) -> Any:
    async def intercept(asked: str) -> Response | None:
        return answer if asked == path else None

    return intercept


def check_whole(made: Sequence[Trajectory]) -> None:
    for each in made:
        assert each.written.all()
        assert len(each.ids) == len(each.sampler_logps) == len(each.versions)
        assert each.finish_reason == ("stop" if each.ids[-1] == END else "length")
        assert each.is_finished or len(each) == LONGEST


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def test_weights_are_loaded_once_for_a_version(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    """By every server, from a folder that is removed with the next version."""
    run = Run(stack, tmp_path, [kind, kind])
    other = jax.tree.map(lambda x: x * 2, model)
    for version, weights in enumerate((model, model, other)):
        run.sampler.set_weights(weights, version)
        run.sampler.set_weights(weights, version)
        for _ in range(2):
            made = run.sample()
            check_whole(made)
            assert {v for each in made for v in each.versions.tolist()} == {version}
        assert [each.name for each in tmp_path.iterdir()] == [f"v{version}"]
    folders = [str(tmp_path / f"v{version}") for version in range(3)]
    for engine in run.engines:
        assert engine.folders == folders
        assert engine.version.startswith("2-")
        assert len(engine.bodies) >= 6 * 4
    run.sampler.close()
    assert not [*tmp_path.iterdir()]


def test_a_server_with_old_weights_is_sent_them_again(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    """Its version is looked at before each batch."""
    run = Run(stack, tmp_path, [kind, kind])
    run.sampler.set_weights(model, 0)
    run.sample()
    run.engines[1].version = "of another run"
    check_whole(run.sample())
    assert [len(each.folders) for each in run.engines] == [1, 2]
    assert run.engines[0].version == run.engines[1].version


def test_a_server_that_keeps_old_weights_is_refused(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 4)
    (engine,) = run.engines
    engine.loads = False
    with pytest.raises(
        RunError, match=rf"{engine.address} has the weights default, .* 4-[0-9a-f]+ from .*v4"
    ):
        run.sample()
    assert len(engine.folders) == 2


def test_a_server_that_starts_again_is_sent_the_weights(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    """Once it has failed, nobody knows which weights it has."""
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    (engine,) = run.engines
    run.sample()
    engine.version = "default"
    engine.intercept = once(COMPLETES[kind], JSONResponse({}, 503))
    check_whole(run.sample())
    assert len(engine.folders) == 2
    assert engine.version.startswith("0-")


def test_an_answer_of_other_weights_is_not_taken(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder
) -> None:
    """SGLang says of each answer which weights have drawn it."""
    run = Run(stack, tmp_path, ["sglang"])
    run.sampler.set_weights(model, 0)
    (engine,) = run.engines

    async def changes(path: str) -> None:
        if path == COMPLETES["sglang"] and len(engine.folders) == 1:
            engine.version = "sent by somebody else"

    engine.intercept = changes
    check_whole(run.sample(1))
    assert len(engine.folders) == len(engine.bodies) == 2


def test_another_model_is_refused(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    (engine,) = run.engines
    status = 500 if kind == "vllm" else 400
    said = JSONResponse({"success": False, "message": "size of tensor\nX"}, status)
    engine.intercept = always(LOADS[kind], said)
    with pytest.raises(RunError, match=r"size of tensor X.*must serve the run's model"):
        run.sample()


async def _broken() -> AsyncIterator[bytes]:
    yield b'{"choices"'
    raise ConnectionError("the server dies")


FAILURES = {
    "busy": lambda: JSONResponse({"error": {"message": "too many"}}, 429),
    "failing": lambda: JSONResponse({"detail": "out of memory"}, 500),
    "not json": lambda: Response("<html>"),
    "cut off": lambda: Response('{"choices": [{"token_i'),
    "dying": lambda: StreamingResponse(_broken(), headers={"content-length": "1000"}),
    "empty": lambda: JSONResponse({}),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_request_is_sent_again(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind, failure: str
) -> None:
    """To the same server, if there is no other."""
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    expected = run.sample()
    run.engines[0].intercept = once(COMPLETES[kind], FAILURES[failure]())
    again = run.sample()
    for one, other in zip(again, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.sampler_logps.tolist() == other.sampler_logps.tolist()


CHANGES = {
    "truncated": lambda x: Made(x.ids[:1], x.logps[:1], "length"),
    "aborted": lambda x: Made([9], [-1.0], "abort"),
    "stopped": lambda x: Made([9], [-1.0], "stop"),
    "other ids": lambda x: Made([VOCAB], [-1.0], "stop"),
    "not a number": lambda x: Made(x.ids, [None] * len(x.ids), x.reason),
    "no tokens": lambda x: Made([], [], x.reason),
    "too many": lambda x: Made([9] * 99, [-1.0] * 99, "length"),
}
SAID = {
    "truncated": "ends by 'length' after 1 of", "aborted": "ends by 'abort'",
    "stopped": "the token 9, which ends no completion", "other ids": f"the token {VOCAB}",
    "not a number": "not finite numbers", "no tokens": "0 tokens of", "too many": "99 tokens of",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_answers_that_are_not_whole_end_the_run(
    stack: contextlib.ExitStack,
    tmp_path: Path,
    model: Decoder,
    kind: Kind,
    change: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    (engine,) = run.engines
    engine.change = CHANGES[change]
    with pytest.raises(RunError, match=f"3 answers.*{engine.address} .*{SAID[change]}"):
        run.sample(1)
    assert len(engine.bodies) == 3
    warned = capsys.readouterr().err
    assert warned.count(SAID[change]) == 1
    assert f"{engine.address}: the answer" in warned


def test_other_logps_are_taken_as_they_are(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    expected = run.sample()
    run.engines[0].change = lambda x: x._replace(logps=[each + 0.05 for each in x.logps])
    for one, other in zip(run.sample(), expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps + 0.05, atol=1e-6)


def test_the_run_goes_on_without_a_server_that_dies(
    stack: contextlib.ExitStack,
    tmp_path: Path,
    model: Decoder,
    kind: Kind,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(stack, tmp_path, [kind, kind])
    run.sampler.set_weights(model, 0)
    expected = run.sample()
    assert all(each.bodies for each in run.engines)
    run.engines[0].stop()
    for _ in range(20):
        made = run.sample()
        assert [x.ids.tolist() for x in made] == [x.ids.tolist() for x in expected]
    warned = capsys.readouterr().err
    assert warned.count(f"{run.engines[0].address} fails again and again") == 1
    assert run.engines[1].address not in warned
    run.engines[1].stop()
    with pytest.raises(RunError, match="no server is left") as error:
        run.sample()
    assert all(each.address in str(error.value) for each in run.engines)


def test_a_late_answer_is_asked_for_elsewhere(
    stack: contextlib.ExitStack,
    tmp_path: Path,
    model: Decoder,
    kind: Kind,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(stack, tmp_path, [kind, kind], timeout=1.0)
    run.sampler.set_weights(model, 0)
    expected = run.sample()
    late, in_time = run.engines
    before = len(in_time.bodies)

    async def never(path: str) -> None:
        if path == COMPLETES[kind]:
            await asyncio.Event().wait()

    late.intercept = never
    assert [x.ids.tolist() for x in run.sample()] == [x.ids.tolist() for x in expected]
    assert len(in_time.bodies) == before + 16
    warned = capsys.readouterr().err
    assert warned.count(f"{late.address}: {COMPLETES[kind]} has not answered in time") == 1


def test_a_request_that_always_fails_ends_the_run(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    """While the server completes others."""
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    (engine,) = run.engines
    fails = run.sample()[5]

    def change(made: Made) -> Made:
        if made.ids == fails.ids.tolist():
            raise RuntimeError("out of memory")
        return made

    engine.change = change
    with pytest.raises(RunError, match=rf"failed 8 times, last at {engine.address} .*status 500"):
        run.sample()
    assert len(engine.bodies) == 16 + 15 + 8


def test_requests_that_are_refused_are_not_sent_again(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder, kind: Kind
) -> None:
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    (engine,) = run.engines
    said = JSONResponse({"error": {"message": "maximum context length is 8"}}, 400)
    engine.intercept = always(COMPLETES[kind], said)
    with pytest.raises(RunError, match=rf"{engine.address}.*status 400: maximum context length"):
        run.sample(1)
    assert not engine.bodies


def test_the_api_key_is_sent(
    stack: contextlib.ExitStack,
    tmp_path: Path,
    model: Decoder,
    kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRPO_EQX_SAMPLER_API_KEY", "a secret")
    run = Run(stack, tmp_path, [kind])
    run.sampler.set_weights(model, 0)
    run.sample(1)
    assert run.engines[0].headers["authorization"] == "Bearer a secret"
    run.engines[0].intercept = always(COMPLETES[kind], Response(status_code=401))
    with pytest.raises(UserError, match="set the environment variable GRPO_EQX_SAMPLER_API_KEY"):
        run.sample(1)


def test_logps_of_another_distribution_are_refused(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder
) -> None:
    """Each engine has its own, and no engine has them of truncated greedy draws."""
    run = Run(stack, tmp_path, ["vllm"])
    run.engines[0].logprobs_mode = "raw_logprobs"
    run.sampler.set_weights(model, 0)
    for sampling in (Sampling(temperature=0.9), Sampling(top_p=0.5), Sampling(min_p=0.1)):
        with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
            run.sampler.submit([Trajectory([7], Address(0, 0, 0))], sampling).result()
    for sampling in (Sampling(), Sampling(temperature=0.0, top_p=0.5)):
        run.sampler.submit([Trajectory([7], Address(0, 0, 0))], sampling).result()
    run = Run(stack, tmp_path, ["sglang"])
    run.sampler.set_weights(model, 0)
    with pytest.raises(UserError, match="leave them unset, or use vLLM"):
        run.sampler.submit([Trajectory([7], Address(0, 0, 0))], Sampling(top_k=5)).result()
    made = run.sampler.submit([Trajectory([7], Address(0, 0, 0))], Sampling(temperature=0.0))
    (greedy,) = made.result().trajectories
    assert not greedy.sampler_logps.any()


def test_servers_of_other_kinds_are_refused(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder
) -> None:
    for path, said in (("/version", "neither a vLLM nor"), ("/weight_info", "DEV_MODE=1")):
        run = Run(stack, tmp_path, ["vllm"])
        run.sampler.set_weights(model, 0)
        run.engines[0].intercept = always(path, Response(status_code=404))
        with pytest.raises(UserError, match=said):
            run.sample(1)


@pytest.mark.parametrize(
    "address", ["host:8000", "ftp://host", "http://", "http://host:x", "http://h/v1"]
)
def test_addresses_are_checked(tmp_path: Path, address: str) -> None:
    options = RemoteOptions(
        sampling=Sampling(), max_completion_length=1, seed=0, end_ids=[END],
        stopping=Stopping.of_ids([END], VOCAB),
    )  # fmt: skip
    with pytest.raises(UserError, match="not the address of a server"):
        RemoteSampler([address], tmp_path, options)
    for addresses in ([], ["http://host:8000", "http://host:8000/"]):
        with pytest.raises(UserError, match="each address once"):
            RemoteSampler(addresses, tmp_path, options)


def test_a_folder_that_cannot_be_written_is_named(
    stack: contextlib.ExitStack, tmp_path: Path, model: Decoder
) -> None:
    (tmp_path / "file").touch()
    run = Run(stack, tmp_path / "file", ["vllm"])
    run.sampler.set_weights(model, 0)
    with pytest.raises(RunError, match="cannot be written to"):
        run.sample()
