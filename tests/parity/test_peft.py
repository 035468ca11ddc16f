"""Adapters here and in PEFT: the same folder gives the same logits."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models import Decoder, from_pretrained, save_pretrained
from grpo_eqx.models.lora import Lora, with_adapters
from grpo_eqx.sharding import AutoMesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::FutureWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]

IDS = np.random.default_rng(0).integers(0, 97, (2, 11))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
logits = jax.jit(Decoder.logits)


@pytest.fixture(scope="module", params=["Qwen2", "Qwen3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random model that transformers wrote."""
    config = getattr(transformers, f"{request.param}Config")(
        hidden_size=48, intermediate_size=75, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, num_hidden_layers=2, vocab_size=97, rope_theta=1e4, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(folder)
    return folder


def their_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.float().numpy()


def our_logits(folder: Path) -> np.ndarray:
    model = from_pretrained(folder, AutoMesh().build(jax.devices()[:1]))
    return np.asarray(logits(model, jnp.asarray(IDS, jnp.int32)))


def assert_close(ours: Any, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("rank_stabilized", [False, True])
@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj"]], ids=["all", "two"])
def test_we_load_their_adapters(
    base: Path, tmp_path: Path, targets: list[str], rank_stabilized: bool
):
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, use_rslora=rank_stabilized,
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = their_logits(theirs)
    adapted = peft.get_peft_model(theirs, config)
    adapted.save_pretrained(tmp_path)
    expected = their_logits(adapted)
    assert np.abs(expected - plain).max() > 0.1
    assert_close(our_logits(tmp_path), expected)


@pytest.mark.parametrize("target", [None, ("k_proj", "down_proj")], ids=["all", "two"])
def test_they_load_our_adapters(base: Path, tmp_path: Path, target: tuple[str, ...] | None):
    model = from_pretrained(base, AutoMesh().build(jax.devices()[:1]))
    lora = Lora(rank=3, alpha=32.0, target=target, rank_stabilized=True)
    adapted = with_adapters(model, lora, jax.random.key(0))
    rng = np.random.default_rng(1)
    adapted = jax.tree.map(
        lambda x, is_adapter: jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype)
        if is_adapter else x,
        adapted,
        adapted.trainable,
    )  # fmt: skip
    save_pretrained(adapted, tmp_path / "adapter", base=str(base))
    save_pretrained(adapted.merged(), tmp_path / "merged")
    ours = our_logits(tmp_path / "adapter")
    assert np.abs(ours - our_logits(base)).max() > 0.1
    beneath = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert_close(ours, their_logits(peft.PeftModel.from_pretrained(beneath, tmp_path / "adapter")))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(ours, their_logits(merged))
