"""SGLang: its native server.

Routes: https://docs.sglang.io/docs/basic_usage/native_api.md. Requests:
https://docs.sglang.io/docs/basic_usage/sampling_params.md. Weights:
https://docs.sglang.io/docs/advanced_features/sglang_for_rl.md.
"""

from typing import Any, final

from grpo_eqx.generation.remote.connection import AnswerError, Connection, RefusedError
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

_INFO = "/model_info", "/get_model_info"
"""Route of the facts of a model, by its new and its old name."""


@final
class SGLang(Engine):
    """An SGLang server."""

    def __init__(self, info: str):
        """**Arguments:**

        - `info`: path of the facts of its model.
        """
        self._info = info

    @classmethod
    async def find(cls, connection: Connection) -> "SGLang | None":
        for path in _INFO:
            found = await connection.find(path)
            if found is not None and "model_path" in found:
                return cls(path)
        return None

    def fault(self, sampling: Sampling) -> str | None:
        if sampling.temperature is None or not is_truncated(sampling):
            return None
        return (
            "SGLang returns log-probs from before top_k, top_p and min_p, which are set: leave "
            "them unset, or use vLLM"
        )

    def request(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "input_ids": list(asked.ids),
            "sampling_params": {
                "max_new_tokens": asked.max_tokens,
                **sampling_fields(asked.sampling),
                "sampling_seed": asked.seed,
                "stop": list(asked.stop_strings),
                "stop_token_ids": list(asked.end_ids),
                "no_stop_trim": True,
            },
            "return_logprob": True,
        }

    def read(self, body: Any) -> Answer:
        meta = field(body, "meta_info")
        pairs = field(meta, "output_token_logprobs")
        if not isinstance(pairs, list) or not all(
            isinstance(x, list) and len(x) > 1 for x in pairs
        ):
            raise AnswerError("the answer has output_token_logprobs that are not pairs")
        ids, logps = read_tokens(
            [x[1] for x in pairs], [x[0] for x in pairs], field(meta, "completion_tokens")
        )
        version = meta.get("weight_version")
        reason = str(field(meta, "finish_reason", "type"))
        return Answer(ids, logps, reason, None if version is None else str(version))

    async def load(self, connection: Connection, folder: str, version: str) -> None:
        answer = await connection.post(
            "/update_weights_from_disk",
            {"model_path": folder, "weight_version": version, "flush_cache": True},
        )
        if field(answer, "success") is not True:
            raise RefusedError(200, str(field(answer, "message")))

    async def version(self, connection: Connection) -> str:
        return str(field(await connection.get(self._info), "weight_version"))
