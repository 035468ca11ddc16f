"""A model, a folder, a run or a checkpoint, to be served."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from grpo_eqx.common.errors import UserError
from grpo_eqx.data.run_inputs import PLAIN, tokenizer_in
from grpo_eqx.evaluation.subject import Subject
from grpo_eqx.generation.open_session import OpenSession
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.models.registry import read_config
from grpo_eqx.run.programs import make_programs
from grpo_eqx.run.prompt_lengths import PromptLengths
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.mesh import parse_mesh

_LONGEST = 4096
"""Default limit on the tokens of a request."""


class ServedModel:
    """A model on the devices, and its tokenizer."""

    def __init__(self, name: str, settings: Mapping[str, Any], say: Callable[[str], None]):
        """**Arguments:**

        - `name`: the model, by name or path.
        - `settings`: settings in place of those of its run.
        - `say`: shows the user a line on what begins.

        Raises `UserError` if anything is missing or does not fit.
        """
        subject = Subject.find(name)
        cfg = GRPOConfig(**{**subject.settings, **settings}).resolved()
        self.name = name
        template = cfg.chat_template
        tokenizer = tokenizer_in(
            model_folder(cfg.model), cfg.system_prompt, None if template == PLAIN else template,
            tuple(cfg.chat_template_kwargs),
        )  # fmt: skip
        self.tokenizer = tokenizer.at(datetime.now())
        self._config = read_config(model_folder(cfg.model) / "config.json")
        self.tokenizer.check_belongs_to(self._config.vocab_size)
        run = RunSpec(cfg, self._config, PromptLengths.longest(cfg))
        mesh = parse_mesh(cfg.mesh).build()
        programs = make_programs(run, mesh, self.tokenizer, lambda x: say(f"compiling {x}"))
        say(f"loading the model onto {mesh.size} device{'s' if mesh.size > 1 else ''}")
        self.sampler, self.model = programs.sampler, subject.load(run, programs.updater)

    def session(self, num_slots: int, max_length: int | None = None) -> OpenSession:
        """Returns a session that completes requests.

        **Arguments:**

        - `num_slots`: completions at a time.
        - `max_length`: limit on the tokens of a request; by default the model's, at most 4096.

        Raises `UserError` for a limit above the model's, and where devices cannot split the slots.
        """
        most = self._config.max_position_embeddings
        length = min(most, _LONGEST) if max_length is None else max_length
        if not 2 <= length <= most:
            raise UserError(f"max_model_len is {length}: the model has 2 to {most} positions.")
        self.sampler.set_weights(self.model, 0)
        return self.sampler.open_session(num_slots, length)
