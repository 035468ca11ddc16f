"""Objects in place of settings are refused where no run could use them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import optax
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.random_keys import make_key
from grpo_eqx.loss_backends import DenseLoss
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.planner import plan_config
from grpo_eqx.run.passed import Passed, as_config, one_of
from grpo_eqx.sharding import ExplicitMesh, Mesh


class NoDevices(Mesh):
    """A mesh whose `shape` takes no devices."""

    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        return 1, 1, 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mesh": ExplicitMesh}, "mesh: ExplicitMesh is a class: pass an object of it"),
    ({"mesh": NoDevices()}, "the method shape of mesh NoDevices must take devices"),
    ({"loss_backend": "dense"}, "loss_backend is 'dense': pass an object of"),
    ({"optimizer": optax.adamw}, r"optimizer is the function adamw: call it, as in adamw\(...\)"),
]


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Leaves the answer to a wrong type to the package, as in a user's process."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("given", "message"), REFUSED, ids=["class", "method", "name", "function"])
@pytest.mark.parametrize(
    "take",
    [Passed, lambda **given: plan_config(GRPOConfig(), **given)],
    ids=["passed", "plan_config"],
)
def test_what_no_run_could_use_is_refused(take: Any, given: dict[str, Any], message: str) -> None:
    """Before a plan is made, as before a run."""
    with pytest.raises(UserError, match=message):
        take(**given)


def test_a_model_comes_with_its_tokenizer() -> None:
    config = Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2.init(config, make_key(0))
    with pytest.raises(UserError, match="without its tokenizer: pass both"):
        Passed(model=model)


def test_objects_are_described_by_the_settings_that_they_replace() -> None:
    passed = Passed(
        tokenizer="t", train_data=[{"question": "x"}], eval_data="a.jsonl", loss_backend=DenseLoss()
    )
    assert passed.described() == {"data": "list", "loss_backend": "DenseLoss"}


class Torch:
    """Stands for a model of transformers."""

    __module__ = "transformers.models.qwen2"


@pytest.mark.parametrize(
    ("cfg", "model", "message"),
    [
        ("Qwen/Qwen2.5-0.5B", None, r"as in GRPOTrainer\(model='Qwen/Qwen2.5-0.5B'\)"),
        ({"steps": 3}, None, r"the config is a dict: pass GRPOConfig\(\*\*that\)"),
        (None, Torch(), "the model is a Torch of torch: pass the folder"),
    ],
    ids=["name", "dict", "torch"],
)
def test_what_is_no_config_or_model_is_refused(cfg: Any, model: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_config(cfg, model)


def test_a_model_and_data_can_be_passed_by_their_names() -> None:
    named = as_config(None, None, Path("a.jsonl"), "openai/gsm8k:test")
    assert (named.data, named.eval_data) == ("a.jsonl", "openai/gsm8k:test")
    assert as_config(None, None, [{"question": "x"}]) == GRPOConfig()
    assert as_config(None, "Qwen/Qwen2.5-3B").model == "Qwen/Qwen2.5-3B"
    assert as_config(GRPOConfig(steps=3), Path("folder")) == GRPOConfig(steps=3, model="folder")


def test_an_argument_has_one_of_its_names() -> None:
    assert one_of(args=None, cfg=3) == one_of(args=3, cfg=None) == 3
    assert one_of(args=None, cfg=None) is None
    with pytest.raises(UserError, match="args and cfg are the same argument: pass one of them"):
        one_of(args=1, cfg=2)
