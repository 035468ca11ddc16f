"""Objects in place of settings are refused where no run could use them."""

from collections.abc import Iterator
from typing import Any

import jaxtyping
import optax
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.prng import make_key
from grpo_eqx.loss_backends import DenseLoss
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.planner import plan_config
from grpo_eqx.run.passed import Passed
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
