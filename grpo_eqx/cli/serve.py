"""The command `grpo-eqx serve`."""

import contextlib
import dataclasses
import hmac
import os
import signal
from collections.abc import Iterator
from typing import Annotated, Literal

import tyro

from grpo_eqx.cli.flags import ends_with_a_line
from grpo_eqx.cli.streams import standard_output
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.settings.config import GRPOConfig

KEY = "GRPO_EQX_API_KEY"
"""Environment variable with the API key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Subcommand):
    """Serve a model at OpenAI's routes, for any client that speaks to them.

    grpo-eqx serve MODEL [--port 8000]

    /v1/chat/completions, /v1/completions and /v1/models, with tools, streams and log-probs;
    /health and /metrics. Ctrl-C ends it.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Model folder, hub name, adapter, or tiny_qwen2, the embedded model; or the folder of a run,
    for its final model or its newest checkpoint, or a checkpoint, such as
    RUN/checkpoints/step_100."""
    host: str = "127.0.0.1"
    """Address to listen at. One that other machines reach needs an API key, in the environment
    variable GRPO_EQX_API_KEY, which clients then send."""
    port: int = 8000
    """Port to listen at. 0: any that is free."""
    max_model_len: int | None = None
    """Maximum number of tokens of a prompt and its completion. None: those of the model, at most
    4096."""
    max_num_seqs: int = 8
    """Completions decoded at a time; others wait."""
    system_prompt: str | None = None
    """System message of conversations without one. None: that of the run, else left to the
    template."""
    chat_template: str | None = None
    """File with a chat template (Jinja). None: that of the run, else the tokenizer's own."""
    rollout_dtype: Literal["auto", "bfloat16", "int8"] | None = None
    """Dtype of the weights. None: that of the run, else auto."""
    mesh: str | None = None
    """Device mesh as dp,fsdp,tp. None: auto."""
    seed: int | None = None
    """Seed of sampling, for requests with a seed. None: that of the run, else 0."""

    def run(self, command: tuple[str, ...]) -> int:
        with ends_with_a_line(), standard_output():
            self._serve()
        return 0

    def _serve(self) -> None:
        from grpo_eqx.environments.chat_format import ChatFormats
        from grpo_eqx.environments.endpoint.app import Endpoint
        from grpo_eqx.environments.endpoint.clients import Guest
        from grpo_eqx.environments.endpoint.exchange import Exchange
        from grpo_eqx.environments.endpoint.server import is_loopback, listening, served
        from grpo_eqx.evaluation.served_model import ServedModel
        from grpo_eqx.tracking.stages import Stages
        from grpo_eqx.training.compilation import use_compilation_cache

        key = os.environ.get(KEY) or None
        if key is None and not is_loopback(self.host):
            raise UserError(
                f"--host is {self.host}, which others reach, and there is no API key: set the "
                f"environment variable {KEY}, which clients then send."
            )
        given = {name: getattr(self, name) for name in _SETTINGS}
        settings = {name: value for name, value in given.items() if value is not None}
        GRPOConfig(**settings)
        use_compilation_cache()
        stages = Stages()
        model = ServedModel(self.model, settings, stages.say)
        session = model.session(self.max_num_seqs, self.max_model_len)
        exchange = Exchange(session)
        guest = Guest(session.max_length)

        def client_of(given: str) -> Guest | None:
            is_known = key is None or hmac.compare_digest(given.encode(), key.encode())
            return guest if is_known else None

        endpoint = Endpoint(exchange, ChatFormats(model.tokenizer), model.name, client_of)
        listener = listening(self.host, self.port, "--port")
        with _asked_to_end() as asked, served(endpoint, listener) as address:
            print_clean(f"{model.name} is at {address}/v1, with up to {session.max_length} tokens")
            exchange.run(lambda: bool(asked))


_SETTINGS = ("system_prompt", "chat_template", "rollout_dtype", "mesh", "seed")
"""Flags that are also settings of a run."""


@contextlib.contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """Yields a list to which Ctrl-C and SIGTERM add; a second Ctrl-C ends the program at once."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
