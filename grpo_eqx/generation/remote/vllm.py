"""vLLM: its OpenAI-compatible server in development mode.

Routes: https://docs.vllm.ai/en/latest/serving/online_serving/. Bodies of completions:
https://docs.vllm.ai/en/latest/serving/online_serving/openai_compatible_server/.
"""

from typing import Any, final

from grpo_eqx.common.errors import UserError
from grpo_eqx.generation.remote.connection import Connection
from grpo_eqx.generation.remote.engine import (
    Answer,
    Asked,
    Engine,
    field,
    is_truncated,
    read_tokens,
    sampling_fields,
)
from grpo_eqx.generation.sampling import Sampling

_PROCESSED = "processed_logprobs"


@final
class VLLM(Engine):
    """A vLLM server."""

    def __init__(self, model: str, logprobs_mode: str | None):
        """**Arguments:**

        - `model`: the name under which it serves its model.
        - `logprobs_mode`: which log-probs it returns; `None` where it does not say.
        """
        self._model, self._logprobs_mode = model, logprobs_mode

    @classmethod
    async def find(cls, connection: Connection) -> "VLLM | None":
        if (version := await connection.find("/version")) is None or "version" not in version:
            return None
        models = await connection.get("/v1/models")
        info = await connection.find("/server_info?config_format=json")
        if info is None or await connection.find("/weight_info") is None:
            raise UserError(
                f"{connection.address} is a vLLM server that cannot be sent weights: start a vLLM "
                f"that has /weight_info, with the environment variable VLLM_SERVER_DEV_MODE=1, "
                f"where only this run reaches it."
            )
        config: Any = info.get("vllm_config")
        of_model = config.get("model_config") if isinstance(config, dict) else None
        mode = of_model.get("logprobs_mode") if isinstance(of_model, dict) else None
        return cls(field(models, "data", 0, "id"), mode)

    def fault(self, sampling: Sampling) -> str | None:
        is_plain = sampling.temperature == 1 and not is_truncated(sampling)
        if self._logprobs_mode == _PROCESSED or sampling.temperature is None or is_plain:
            return None
        return (
            f"it returns {self._logprobs_mode or 'log-probs of an unknown mode'}, and tokens are "
            f"drawn with another temperature than 1, or with top_k, top_p or min_p: start vLLM "
            f"with --logprobs-mode {_PROCESSED}"
        )

    def request(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "model": self._model,
            "prompt": list(asked.ids),
            "max_tokens": asked.max_tokens,
            **sampling_fields(asked.sampling),
            "seed": asked.seed,
            "stop": list(asked.stop_strings),
            "stop_token_ids": list(asked.end_ids),
            "include_stop_str_in_output": True,
            "logprobs": 1,
            "return_token_ids": True,
        }

    def read(self, body: Any) -> Answer:
        ids, logps = read_tokens(
            field(body, "choices", 0, "token_ids"),
            field(body, "choices", 0, "logprobs", "token_logprobs"),
            field(body, "usage", "completion_tokens"),
        )
        return Answer(ids, logps, str(field(body, "choices", 0, "finish_reason")))

    async def load(self, connection: Connection, folder: str, version: str) -> None:
        await connection.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        )
        await connection.post("/reset_prefix_cache")  # keys and values of the weights before
        await connection.post("/update_weight_version", {"new_version": version})

    async def version(self, connection: Connection) -> str:
        return str(field(await connection.get("/weight_info"), "weight_version"))
