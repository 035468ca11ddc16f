"""The inputs of a run besides weights: tokenizer and problems, read and checked."""

import copy
import json
import os
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from grpo_eqx.common.errors import FileError, UserError, listed
from grpo_eqx.common.plain_data import why_not_plain
from grpo_eqx.common.read_files import expanded, read_text
from grpo_eqx.data.batches import TokenizedPrompts
from grpo_eqx.data.hub_data import repository_of
from grpo_eqx.data.load import Data, load_data
from grpo_eqx.data.prompts import Prompt, PromptSource, quoted
from grpo_eqx.data.records import GivenPrompt, as_prompts
from grpo_eqx.data.token_files import TokenFiles
from grpo_eqx.data.tokenizer import ChatTokenizer, Tools
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.hub import HubName, commit, downloaded
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.settings.config import GRPOConfig

PLAIN = "none"
"""Value of `chat_template` for problems that the model continues without a template."""


class Inputs(NamedTuple):
    """The tokenizer and the problems of a run."""

    tokenizer: ChatTokenizer
    train: TokenizedPrompts
    heldout: TokenizedPrompts

    def check_belong_to(self, model: ModelConfig, cfg: GRPOConfig) -> None:
        """Rejects a tokenizer of another model, and prompts that are too long for the model."""
        self.tokenizer.check_belongs_to(model.vocab_size)
        for problems in (self.train, self.heldout):
            for prompt, ids in zip(problems.prompts, problems.tokens, strict=True):
                if max(ids) >= model.vocab_size:
                    called = f"{problems.name}: the problem {quoted(prompt.text)}"
                    self.tokenizer.check_ids(ids, model.vocab_size, called)
            longest = max(map(len, problems.tokens))
            check_positions(cfg, model, f"the longest prompt of {problems.name}", longest)

    def notes(self) -> list[str]:
        """Returns notes on the prompts, each in one line."""
        template = self.tokenizer.template
        found = []
        if template.asked_for_time:
            found.append(
                f"the chat template asks for the time, which is {template.moment:%Y-%m-%d %H:%M:%S}"
                f" in all prompts of this run"
            )
        if template.drew:
            found.append(
                "the chat template draws at random: a prompt has the same draw at every start"
            )
        names: dict[str, list[str]] = {}
        for problems in (self.train, self.heldout):
            for note in problems.notes:
                names.setdefault(note, []).append(problems.name)
        return [*found, *(f"{listed([*dict.fromkeys(x)])}: {note}" for note, x in names.items())]

    def fingerprints(self) -> dict[str, str]:
        """Returns hashes by which processes compare their inputs."""
        return {
            "the tokenizer": self.tokenizer.fingerprint(),
            "the training problems": self.train.fingerprint(),
            "the held-out problems": self.heldout.fingerprint(),
        }


def hub_commits(cfg: GRPOConfig) -> dict[str, str]:
    """Returns the commits on the hub of what this process has loaded, by setting."""
    found = {
        "model": commit("model", cfg.model),
        "data": commit("dataset", repository_of(cfg.data)),
        "eval_data": commit("dataset", repository_of(cfg.eval_data or "")),
    }
    return {setting: value for setting, value in found.items() if value is not None}


def load_inputs(
    cfg: GRPOConfig,
    tokenizer: ChatTokenizer | Any | None = None,
    train_data: Data | None = None,
    eval_data: Data | None = None,
    *,
    model_passed: bool = False,
    moment: datetime,
    tools: Tools | None = None,
    needs_prompt: bool = True,
) -> Inputs:
    """Reads the tokenizer and the problems that the config names, unless they are passed.

    **Arguments:**

    - `cfg`: the settings.
    - `tokenizer`, `train_data`, `eval_data`: objects passed to the trainer.
    - `model_passed`: whether a model was passed to the trainer.
    - `moment`: the time, for chat templates that ask for it.
    - `tools`: schemas of functions that the model can call, by the environment of a problem.
    - `needs_prompt`: whether problems must have a question or a prompt.
    """
    train, heldout = load_data(
        cfg.data if train_data is None else train_data,
        cfg.eval_data if eval_data is None else eval_data,
        cfg.eval_problems,
        needs_prompt=needs_prompt,
    )
    sources = (train, heldout)
    if cfg.chat_template is not None and all(map(_is_plain, sources)):
        raise UserError(
            f"chat_template is {cfg.chat_template!r}, and the problems of {train} are texts "
            f"that the model continues as they are: it would do nothing; leave it unset."
        )
    tokenizer = _tokenizer_for(sources, cfg, tokenizer, model_passed=model_passed)
    tokenizer = tokenizer.at(moment).with_tools(tools or {})
    inputs = Inputs(
        tokenizer,
        _tokenize(cfg, train, len(train), tokenizer),
        _tokenize(cfg, heldout, cfg.eval_problems, tokenizer),
    )
    if cfg.system_prompt is not None and all(map(_has_system_message, inputs.train.prompts)):
        raise UserError(
            f"system_prompt is set, and all problems of {train} have a system message of "
            f"their own: it would do nothing; leave it unset."
        )
    return inputs


def load_heldout(
    cfg: GRPOConfig, source: PromptSource, moment: datetime
) -> tuple[ChatTokenizer, TokenizedPrompts]:
    """Reads the tokenizer of the config's model, and tokenizes problems to evaluate on."""
    tokenizer = _tokenizer_for([source], cfg).at(moment)
    return tokenizer, _tokenize(cfg, source, len(source), tokenizer)


def encode_prompts(
    prompts: Iterable[GivenPrompt],
    cfg: GRPOConfig,
    tokenizer: ChatTokenizer,
    model: ModelConfig,
    like: Prompt,
    *,
    needs_prompt: bool = True,
) -> tuple[list[Prompt], list[list[int]]]:
    """Tokenizes prompts like the run's problems, and returns both.

    **Arguments:**

    - `prompts`: texts, conversations, rows or prompts, as `as_prompts` takes them.
    - `cfg`, `tokenizer`, `model`: settings, tokenizer and model of the run.
    - `like`: a problem of the run; texts are questions or plain texts, as this problem is.
    - `needs_prompt`: whether rows must have a question or a prompt.

    Raises `UserError` for a prompt with more than `max_prompt_length` tokens, or too many for the
    model's positions.
    """
    messages = as_prompts(prompts, plain=like.plain, needs_prompt=needs_prompt)
    if like.plain and not tokenizer.template.exists and not all(x.plain for x in messages):
        raise UserError(
            "the prompts are messages, and the tokenizer has no chat template, as the problems of "
            "this run are texts that the model continues as they are: pass texts."
        )
    tokens = tokenizer.encode_prompts(messages)
    limit = cfg.max_prompt_length
    for message, ids in zip(messages, tokens, strict=True):
        prompt = f"the prompt {quoted(message.text)}"
        if len(ids) > limit:
            raise UserError(
                f"{prompt} has {len(ids)} tokens, and max_prompt_length is {limit}: raise it or "
                f"shorten the prompt."
            )
        tokenizer.check_ids(ids, model.vocab_size, prompt)
        check_positions(cfg, model, prompt, len(ids))
    return messages, tokens


def _tokenizer_for(
    sources: Sequence[PromptSource],
    cfg: GRPOConfig,
    given: ChatTokenizer | Any | None = None,
    *,
    model_passed: bool = False,
) -> ChatTokenizer:
    """Returns the tokenizer; raises `UserError` for settings that fit none of the problems."""
    tokenizer = _chat_tokenizer(cfg, given)
    if given is not None and (folder := _files_folder(cfg, tokenizer, model_passed)) is not None:
        files = TokenFiles.read(folder)
        tokenizer = tokenizer.of_model(files, files.own_tokenizer())
    if not all(map(_is_plain, sources)):
        tokenizer.check_template()
    if cfg.system_prompt is not None and os.path.isfile(cfg.system_prompt):
        raise UserError(
            f"system_prompt is {cfg.system_prompt!r}, the name of a file: give its text, as in "
            f'--system-prompt "$(cat {cfg.system_prompt})".'
        )
    return tokenizer


def _files_folder(cfg: GRPOConfig, given: ChatTokenizer, model_passed: bool) -> Path | None:
    """Returns the folder of the model's files, for a tokenizer that was passed.

    If the model was passed too, returns the folder that the tokenizer was loaded from, if it is on
    this machine.
    """
    if not model_passed:
        return model_folder(cfg.model)
    source = str(getattr(given.tokenizer, "name_or_path", ""))
    if os.path.isdir(source):  # false for an invalid path
        return Path(source)
    return downloaded("model", HubName(source, None))


def _is_plain(source: PromptSource) -> bool:
    return _problem(source, 0).plain


def _has_system_message(prompt: Prompt) -> bool:
    return not isinstance(prompt.content, str) and prompt.content[0]["role"] == "system"


def _tokenize(
    cfg: GRPOConfig, source: PromptSource, count: int, tokenizer: ChatTokenizer
) -> TokenizedPrompts:
    """Tokenizes the first `count` problems of a source, or all of fewer."""
    prompts = [_problem(source, i) for i in range(min(count, len(source)))]
    return TokenizedPrompts(
        str(source),
        prompts,
        tokenizer,
        max_length=cfg.max_prompt_length,
        overlong=cfg.overlong_prompts,
    )


def _problem(source: PromptSource, index: int) -> Prompt:
    """Returns a problem; raises `UserError` if the user's source returns anything else."""
    prompt = source[index]
    if not isinstance(prompt, Prompt):
        raise UserError(
            f"{source}: __getitem__ returned a {type(prompt).__name__} for problem "
            f"{index + 1}: return grpo_eqx.data.Prompt(text, columns)."
        )
    if (fault := why_not_plain([prompt.content, prompt.columns])) is not None:
        raise UserError(f"{source}, problem {index + 1} {fault}.")
    return prompt


def _chat_tokenizer(cfg: GRPOConfig, given: ChatTokenizer | Any | None) -> ChatTokenizer:
    """Returns the given tokenizer, or else the tokenizer of the config's model."""
    if isinstance(given, ChatTokenizer):
        for name in ("system_prompt", "chat_template", "chat_template_kwargs"):
            if getattr(cfg, name):
                raise UserError(
                    f"{name} is set, and a ChatTokenizer was passed, which brings its own: leave "
                    f"it unset, or pass the tokenizer of transformers."
                )
        return given
    if given is None:
        return tokenizer_in(
            model_folder(cfg.model), cfg.system_prompt, cfg.chat_template,
            tuple(cfg.chat_template_kwargs),
        )  # fmt: skip
    chat = ChatTokenizer(
        copy.copy(given), system_prompt=cfg.system_prompt, plain=cfg.chat_template == PLAIN
    )
    return _with_template(chat, cfg.chat_template, tuple(cfg.chat_template_kwargs))


def tokenizer_in(
    folder: Path,
    system_prompt: str | None,
    chat_template: str | None,
    chat_template_kwargs: Sequence[str] = (),
) -> ChatTokenizer:
    """Returns the tokenizer in a model's folder, changed by the settings of these names."""
    plain = chat_template == PLAIN
    chat = ChatTokenizer.from_pretrained(folder, system_prompt, plain=plain)
    return _with_template(chat, chat_template, chat_template_kwargs)


def _with_template(
    chat: ChatTokenizer, chat_template: str | None, variables: Sequence[str]
) -> ChatTokenizer:
    """Gives a tokenizer the template that settings name, with variables set at its start.

    The template that is saved with a model then has them, too.
    """
    if chat_template not in (None, PLAIN):
        chat.tokenizer.chat_template = _read_template(str(chat_template))
    if variables:
        if not isinstance(chat.tokenizer.chat_template, str) or chat.plain:
            raise UserError(
                "chat_template_kwargs is set, and there is no single chat template: it would do "
                "nothing; leave it out, or set chat_template to a file."
            )
        template = chat.tokenizer.chat_template
        start = "".join(_assignment(each, template) for each in variables)
        chat.tokenizer.chat_template = start + template
    return chat


def _assignment(variable: str, template: str) -> str:
    """Returns the statement of a template that sets a variable, unless its caller does."""
    name, _, text = variable.partition("=")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not name.isidentifier() or value is None:
        raise UserError(
            f"chat_template_kwargs has {variable!r}: write NAME=VALUE with a value in JSON, but "
            f"null, as in enable_thinking=false."
        )
    if not re.search(rf"\b{name}\b", template):
        raise UserError(
            f"chat_template_kwargs has {name}, which the chat template does not read: leave it out."
        )
    # A default, which whoever renders with the saved template can replace.
    return f"{{% if {name} is not defined %}}{{% set {name} = {json.dumps(value)} %}}{{% endif %}}"


def _read_template(path: str) -> str:
    if any(mark in path for mark in ("{%", "{{", "\n")):
        raise UserError(
            "chat_template is the path of a file, and this is a template itself: write it to a "
            "file, and give its path."
        )
    try:
        return read_text(expanded(path), f"chat_template {path!r}", pipe=True)
    except FileError as error:
        raise UserError(
            f"{error} It is a file with a Jinja template, or {PLAIN!r} for problems without one."
        ) from error


def check_positions(cfg: GRPOConfig, model: ModelConfig, prompt: str, length: int) -> None:
    """Rejects a prompt that leaves the model too few positions for a completion.

    **Arguments:**

    - `cfg`, `model`: the settings and the model.
    - `prompt`: what to call the prompt in the message.
    - `length`: its tokens.
    """
    limit, longest = model.max_position_embeddings, cfg.max_completion_length
    assert longest is not None  # resolved
    room = limit - longest
    if length <= room:
        return
    shorter = f", or keep prompts to {room} tokens (max_prompt_length, overlong_prompts)"
    raise UserError(
        f"{prompt} has {length} tokens and max_completion_length is {longest}, together more than "
        f"the {limit} positions of the model (max_position_embeddings): lower "
        f"max_completion_length{shorter if room > 0 else ''}."
    )
