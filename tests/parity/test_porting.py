"""The guide to porting a model, as it is written: its family gives the numbers of transformers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models import Decoder, from_pretrained, save_pretrained
from grpo_eqx.models.registry import FAMILIES
from grpo_eqx.sharding import AutoMesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "porting.md"


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """The names that the page's code defines, while its family is registered."""
    before, names = dict(FAMILIES), {"__name__": "porting"}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    yield names
    FAMILIES.clear()
    FAMILIES.update(before)


def test_the_family_of_the_page_agrees_with_transformers(page: dict[str, Any], tmp_path: Path):
    ((family, fields),) = page["CASE"].values()
    config = getattr(transformers, f"{family}Config")(
        hidden_size=48, intermediate_size=75, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, vocab_size=97, initializer_range=0.2, bos_token_id=1, eos_token_id=[2, 3],
        **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs", AutoMesh().build(jax.devices()[:1]))
    assert isinstance(ours, Decoder)
    ids = np.random.default_rng(0).integers(0, 97, (2, 13))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    found = ours.logits(jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    save_pretrained(ours, tmp_path / "ours")
    back = getattr(transformers, f"{family}ForCausalLM").from_pretrained(tmp_path / "ours")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
