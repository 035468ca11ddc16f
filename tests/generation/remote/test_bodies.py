"""Requests and answers are those that the engines document."""

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from grpo_eqx.generation import Sampling, Stopping
from grpo_eqx.generation.remote.answers import Ends
from grpo_eqx.generation.remote.connection import AnswerError, Connection, RefusedError
from grpo_eqx.generation.remote.engine import Answer, Asked, Engine
from grpo_eqx.generation.remote.sglang import SGLang
from grpo_eqx.generation.remote.vllm import VLLM

ASKED = Asked(
    ids=[5018, 609], max_tokens=15, sampling=Sampling(temperature=0.7, top_k=9), seed=17,
    end_ids=(128009,), stop_strings=("###",),
)  # fmt: skip
FOLDER, VERSION = "/shared/v8", "8-5eed"

# All fields of CompletionResponse, as with logprobs and return_token_ids:
# https://docs.vllm.ai/en/latest/api/vllm/entrypoints/openai/completion/protocol/
VLLM_ANSWER: dict[str, Any] = {
    "id": "cmpl-4ad8b5bd2f2c4e5cb3f0a0ea4e7e3b1c",
    "object": "text_completion",
    "created": 1776830869,
    "model": "NousResearch/Meta-Llama-3-8B-Instruct",
    "choices": [
        {
            "index": 0,
            "text": " Paris",
            "logprobs": {
                "text_offset": [0, 6],
                "token_logprobs": [-0.25, -1.5],
                "tokens": [" Paris", "<|eot_id|>"],
                "top_logprobs": [{" Paris": -0.25}, {"<|eot_id|>": -1.5}],
            },
            "finish_reason": "stop",
            "stop_reason": 128009,
            "token_ids": [12366, 128009],
            "prompt_logprobs": None,
            "prompt_token_ids": [5018, 609],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": None,
    "usage": {
        "prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2,
        "prompt_tokens_details": None,
    },
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}  # fmt: skip
# The first answer of https://docs.sglang.io/advanced_features/structured_outputs.html, shortened to
# two tokens, with the field that return_logprob adds, described in
# https://docs.sglang.io/basic_usage/sampling_params.html
SGLANG_ANSWER: dict[str, Any] = {
    "text": "}",
    "output_ids": [92, 128009],
    "meta_info": {
        "id": "6e25790cd43445af8b1c0dccb395739a",
        "finish_reason": {"type": "stop", "matched": 128009},
        "prompt_tokens": 50,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.25, 92, None], [-1.5, 128009, None]],
        "completion_tokens": 2,
        "cached_tokens": 1,
        "cached_tokens_details": {"device": 1, "host": 0},
        "dp_rank": None,
        "e2e_latency": 0.23216415755450726,
        "response_sent_to_client_ts": 1779394262.2131255,
    },
}
# https://docs.sglang.io/basic_usage/native_api.html
SGLANG_INFO = {
    "model_path": "qwen/qwen2.5-0.5b-instruct",
    "tokenizer_path": "qwen/qwen2.5-0.5b-instruct",
    "is_generation": True,
    "preferred_sampling_params": None,
    "weight_version": "default",
    "has_image_understanding": False,
    "has_audio_understanding": False,
}
SGLANG_LOADED = {
    "success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0,
}  # fmt: skip
SGLANG_REFUSED = {
    "success": False,
    "message": "Failed to get weights iterator: qwen/qwen2.5-0.5b-instruct-wrong (repository not "
    "found).",
}
# Routes of development mode: https://docs.vllm.ai/en/latest/serving/online_serving/ and
# https://docs.vllm.ai/en/latest/training/async_rl/
VLLM_FACTS: dict[str, Any] = {
    "/version": {"version": "0.33.0"},
    "/v1/models": {
        "object": "list",
        "data": [{"id": "NousResearch/Meta-Llama-3-8B-Instruct", "object": "model"}],
    },
    "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
    "/weight_info": {"weight_version": "default"},
}


class Recorded:
    """Answers by path; notes what is asked for."""

    def __init__(self, answers: dict[str, Any]):
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []

    def call(self, work: Callable[[Connection], Any]) -> Any:
        async def run() -> Any:
            transport = httpx.MockTransport(self._answer)
            async with httpx.AsyncClient(transport=transport) as client:
                return await work(Connection("http://host:8000", client))

        return asyncio.run(run())

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, request.url.raw_path.decode(), body))
        if request.url.path not in self.answers:
            return httpx.Response(404, json={"detail": "Not Found"})
        return httpx.Response(200, json=self.answers[request.url.path])


def test_a_request_to_vllm() -> None:
    # https://docs.vllm.ai/en/latest/serving/online_serving/openai_compatible_server/
    assert VLLM("a model", None).request(ASKED) == (
        "/v1/completions",
        {
            "model": "a model", "prompt": [5018, 609], "max_tokens": 15,
            "temperature": 0.7, "top_k": 9, "top_p": 1.0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "seed": 17, "stop": ["###"], "stop_token_ids": [128009],
            "include_stop_str_in_output": True, "logprobs": 1, "return_token_ids": True,
        },
    )  # fmt: skip


def test_a_request_to_sglang() -> None:
    # https://docs.sglang.io/basic_usage/sampling_params.html and
    # https://docs.sglang.io/advanced_features/deterministic_inference.html
    assert SGLang("/model_info").request(ASKED) == (
        "/generate",
        {
            "input_ids": [5018, 609],
            "sampling_params": {
                "max_new_tokens": 15, "temperature": 0.7, "top_k": 9, "top_p": 1.0, "min_p": 0.0,
                "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
                "sampling_seed": 17, "stop": ["###"], "stop_token_ids": [128009],
                "no_stop_trim": True,
            },
            "return_logprob": True,
        },
    )  # fmt: skip


ANSWERS: dict[str, tuple[Engine, dict[str, Any]]] = {
    "vllm": (VLLM("a model", None), VLLM_ANSWER),
    "sglang": (SGLang("/model_info"), SGLANG_ANSWER),
}


def test_answers_are_read() -> None:
    engine, body = ANSWERS["vllm"]
    assert engine.read(body) == Answer([12366, 128009], [-0.25, -1.5], "stop")
    engine, body = ANSWERS["sglang"]
    assert engine.read(body) == Answer([92, 128009], [-0.25, -1.5], "stop", "default")


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_without_a_field_are_named(kind: str) -> None:
    engine, whole = ANSWERS[kind]
    needed = {
        "vllm": ["choices", "usage", "token_ids", "token_logprobs", "finish_reason"],
        "sglang": ["meta_info", "output_token_logprobs", "completion_tokens", "finish_reason"],
    }
    for name in needed[kind]:
        for value in (None, "left out"):
            body = copy.deepcopy(whole)
            _change(body, name, value)
            with pytest.raises(AnswerError, match=f"no .*{name}"):
                engine.read(body)
    for body in (None, [], "text", {"choices": []}, {"meta_info": 5}):
        with pytest.raises(AnswerError, match="the answer has no"):
            engine.read(body)


def _change(body: Any, name: str, value: Any) -> None:
    """Changes or removes a field, wherever it is."""
    for each in body if isinstance(body, list) else [body]:
        if isinstance(each, dict):
            if name in each:
                each[name] = value
                if value == "left out":
                    del each[name]
            for inner in each.values():
                _change(inner, name, value)


def test_a_count_that_differs_is_named() -> None:
    for kind, (engine, whole) in ANSWERS.items():
        body = copy.deepcopy(whole)
        _change(body, "completion_tokens", 3)
        with pytest.raises(AnswerError, match="2 tokens and 2 log-probs of 3 tokens"):
            engine.read(body)
        assert kind in ANSWERS
    body = copy.deepcopy(VLLM_ANSWER)
    _change(body, "token_logprobs", [-0.25])
    with pytest.raises(AnswerError, match="2 tokens and 1 log-probs"):
        ANSWERS["vllm"][0].read(body)


def test_vllm_is_found_and_loads_weights() -> None:
    loads = "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"
    server = Recorded(VLLM_FACTS | {path: {} for path in loads})
    engine = server.call(VLLM.find)
    assert isinstance(engine, VLLM)
    assert engine.request(ASKED)[1]["model"] == "NousResearch/Meta-Llama-3-8B-Instruct"
    assert engine.fault(ASKED.sampling) is None
    assert server.call(SGLang.find) is None
    assert server.call(engine.version) == "default"
    server.asked.clear()
    server.call(lambda connection: engine.load(connection, FOLDER, VERSION))
    # https://docs.vllm.ai/en/latest/features/sleep_mode/ has reload_weights by this route.
    assert server.asked == [
        (
            "POST", "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}},
        ),
        ("POST", "/reset_prefix_cache", None),
        ("POST", "/update_weight_version", {"new_version": VERSION}),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_sglang_is_found_and_loads_weights(path: str) -> None:
    server = Recorded({path: SGLANG_INFO, "/update_weights_from_disk": SGLANG_LOADED})
    engine = server.call(SGLang.find)
    assert isinstance(engine, SGLang)
    assert server.call(VLLM.find) is None
    assert server.call(engine.version) == "default"
    server.asked.clear()
    server.call(lambda connection: engine.load(connection, FOLDER, VERSION))
    # https://docs.sglang.io/advanced_features/sglang_for_rl.html
    body = {"model_path": FOLDER, "weight_version": VERSION, "flush_cache": True}
    assert server.asked == [("POST", "/update_weights_from_disk", body)]
    server.answers["/update_weights_from_disk"] = SGLANG_REFUSED
    with pytest.raises(RefusedError, match="Failed to get weights iterator"):
        server.call(lambda connection: engine.load(connection, FOLDER, VERSION))


def test_an_answer_ends_where_a_stop_string_is_whole() -> None:
    """A server may find it a few tokens later."""
    texts = [b"", b"a", b"#", b"##", b"b#"]
    ends = Ends(Stopping.of_strings([0], ["###"], texts))
    asked = Asked(ids=[1], max_tokens=6, sampling=Sampling(), end_ids=[0], seed=0)

    def checked(ids: list[int], reason: str) -> tuple[list[int], str]:
        logps = np.linspace(-1, -2, len(ids)).tolist()
        answer = ends.checked(asked, Answer(ids, logps, reason))
        assert answer.logps == logps[: len(answer.ids)]
        return answer.ids, answer.finish_reason

    assert checked([1, 2, 3], "stop") == ([1, 2, 3], "stop")
    assert checked([1, 4, 3, 1, 1], "stop") == ([1, 4, 3], "stop")
    assert checked([2, 3, 1, 1, 1, 1], "length") == ([2, 3], "stop")
    assert checked([1, 0], "stop") == ([1, 0], "stop")
    assert checked([1, 1, 1, 1, 1, 0], "length") == ([1, 1, 1, 1, 1, 0], "stop")
    assert checked([1, 2, 1, 2, 1, 2], "length") == ([1, 2, 1, 2, 1, 2], "length")
    with pytest.raises(AnswerError, match="ends no completion"):
        checked([1, 2, 2], "stop")
