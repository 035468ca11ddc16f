"""Published models are known by their names, without network access."""

import jax
import pytest

from grpo_eqx.models.registry import init_model, published_config


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
    ],
)
def test_their_sizes_are_the_published_ones(name: str, parameters: int):
    config = published_config(name)
    assert config is not None
    shapes = jax.eval_shape(lambda key: init_model(config, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "somebody/Qwen3-8B", "Qwen3-8B", "llama"])
def test_others_are_not_guessed(name: str):
    assert published_config(name) is None
