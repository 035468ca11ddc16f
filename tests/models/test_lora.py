"""Low-rank adapters: what they compute, what is trained, and PEFT's folders."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_eqx.common.errors import UserError, WeightsError
from grpo_eqx.data.token_files import TokenFiles
from grpo_eqx.models import Decoder, Qwen2Config, Qwen3Config, from_pretrained, save_pretrained
from grpo_eqx.models.decoder import DecoderLayer
from grpo_eqx.models.layers import Linear, LowRank
from grpo_eqx.models.lora import Lora, linear_names, prepared, with_adapters
from grpo_eqx.models.peft import CONFIG, WEIGHTS
from grpo_eqx.models.pretrained import base_model, check_adapter, model_folder
from grpo_eqx.sharding import parse_mesh

SIZES: dict[str, Any] = dict(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)), jnp.int32)
LORA = Lora(rank=3, alpha=6.0)

logits = eqx.filter_jit(Decoder.logits)


def random_model(family: str = "qwen2") -> Decoder:
    config = {"qwen2": Qwen2Config(**SIZES), "qwen3": Qwen3Config(**SIZES, head_dim=6)}[family]
    return Decoder.init(config, jax.random.key(0), std=0.2)


def trained(model: Decoder, lora: Lora = LORA, std: float = 0.3) -> Decoder:
    """A model whose adapters have learned something."""
    adapted = with_adapters(model, lora, jax.random.key(1))
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x, is_adapter: jnp.asarray(rng.normal(0, std, x.shape), x.dtype)
        if is_adapter else x,
        adapted,
        adapted.trainable,
    )  # fmt: skip


def test_new_adapters_change_nothing():
    model = random_model()
    np.testing.assert_array_equal(
        logits(with_adapters(model, LORA, jax.random.key(1)), IDS), logits(model, IDS)
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "lora",
    [LORA, Lora(rank=4, alpha=6.0, target=("q_proj", "down_proj"), rank_stabilized=True)],
    ids=["all", "two, rank-stabilized"],
)
def test_the_merged_model_computes_the_same(family: str, lora: Lora):
    model = trained(random_model(family), lora)
    assert np.abs(logits(model, IDS) - logits(model.without_adapters(), IDS)).max() > 0.1
    np.testing.assert_allclose(logits(model, IDS), logits(model.merged(), IDS), atol=2e-5)
    assert not model.merged().has_adapters


@pytest.mark.parametrize("base_in_8bit", [False, True])
def test_frozen_weights_take_less_and_adapters_do_not(base_in_8bit: bool):
    lora = dataclasses.replace(LORA, base_in_8bit=base_in_8bit)
    model = random_model()
    small = prepared(trained(model), lora, jnp.bfloat16, jax.random.key(0)).layers.q_proj
    assert small.weight.dtype == (jnp.int8 if base_in_8bit else jnp.bfloat16)
    assert (small.bias.dtype, small.adapter.b.dtype) == (jnp.bfloat16, jnp.float32)
    assert small.astype(jnp.float16).weight.dtype == (jnp.int8 if base_in_8bit else jnp.float16)


def test_int8_weights_are_merged_and_differentiated_as_what_they_stand_for():
    lora = dataclasses.replace(LORA, base_in_8bit=True)
    model = prepared(trained(random_model()), lora, jnp.float32, jax.random.key(0))
    np.testing.assert_allclose(logits(model, IDS), logits(model.merged(), IDS), atol=5e-5)
    plain = logits(trained(random_model()), IDS)
    assert 0 < np.abs(logits(model, IDS) - plain).max() < 0.1 * np.abs(plain).max()

    def gradient(model: Decoder) -> list[jax.Array]:
        params, frozen = eqx.partition(model, model.trainable)

        def loss(params: Decoder) -> jax.Array:
            return jnp.square(eqx.combine(params, frozen).logits(IDS)).mean()

        return jax.tree.leaves(jax.grad(loss)(params))

    unrounded = dataclasses.replace(model, layers=unrounded_layers(model))
    for found, expected in zip(gradient(model), gradient(unrounded), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_a_change_too_small_for_a_bfloat16_weight_still_counts():
    """Outputs are added, not weights."""
    weight, small = jnp.asarray([[1.0, -1.0]]), 2.0**-10  # 1 + 2^-10 is 1 in bfloat16
    adapter = LowRank(jnp.asarray([[1.0, 0.0]]), jnp.asarray([[small]]), scale=1.0)
    for dtype in (jnp.float32, jnp.bfloat16):
        linear = Linear(weight, adapter=adapter).astype(dtype)
        assert linear(jnp.ones(2, dtype)) == small


def test_an_adapter_has_the_values_and_gradients_of_the_sum_of_weights() -> None:
    rng = np.random.default_rng(0)
    x, dy, weight, a, b = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 5, 16), (2, 5, 12), (12, 16), (3, 16), (3, 12))
    )
    linear = Linear(weight, adapter=LowRank(a, b, scale=0.5))

    def summed(linear: Linear, x: jax.Array) -> jax.Array:
        assert linear.adapter is not None
        return jnp.matmul(x, (linear.weight + linear.adapter.delta()).T, precision="highest")

    added, of_added = jax.vjp(lambda linear, x: linear(x), linear, x)
    expected, of_expected = jax.vjp(summed, linear, x)
    for found, wanted in zip(
        jax.tree.leaves((added, of_added(dy))),
        jax.tree.leaves((expected, of_expected(dy))),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_weights_that_are_int8_already_stay_as_they_are():
    """Those without an adapter, in a rollout with int8 weights."""
    lora = Lora(rank=3, alpha=6.0, target=("q_proj",), base_in_8bit=True)
    model = prepared(trained(random_model(), lora), lora, jnp.float32, jax.random.key(0))
    merged = model.merged()
    rounded = merged.rounded(jnp.float32)
    np.testing.assert_array_equal(rounded.layers.v_proj.weight, merged.layers.v_proj.weight)
    np.testing.assert_array_equal(rounded.layers.v_proj.scales, merged.layers.v_proj.scales)


def unrounded_layers(model: Decoder) -> DecoderLayer:
    """Layers with the float32 weights that int8 ones stand for."""

    def unrounded(x: Any) -> Any:
        if not isinstance(x, Linear):
            return x
        return dataclasses.replace(x, weight=x.weight * x.scales[..., None], scales=None)

    return jax.tree.map(unrounded, model.layers, is_leaf=lambda x: isinstance(x, Linear))


def test_the_scale_is_that_of_peft():
    assert Lora(rank=4, alpha=6.0).scale == 1.5
    assert Lora(rank=4, alpha=6.0, rank_stabilized=True).scale == 3.0


def test_only_adapters_are_trained():
    model = trained(random_model(), Lora(rank=2, alpha=1.0, target=("v_proj",)))
    params = eqx.filter(model, model.trainable)
    shapes = sorted(x.shape for x in jax.tree.leaves(params))
    assert shapes == [(2, 2, 16), (2, 2, 32)]


def test_gradients_are_those_of_full_training_through_the_adapter():
    """With a weight `W + s B A`, they are `s B^T dW` for `A`, and `s dW A^T` for `B`."""
    model = trained(random_model(), std=0.1)
    towards = jnp.asarray(np.random.default_rng(3).normal(size=(2, 9, 32)), jnp.float32)
    params, frozen = eqx.partition(model, model.trainable)

    def loss(model: Decoder) -> jax.Array:
        return jnp.vdot(model.logits(IDS), towards)

    ours = jax.jit(jax.grad(lambda params: loss(eqx.combine(params, frozen))))(params)
    full = jax.jit(jax.grad(loss))(model.merged())
    for name in linear_names(model):
        adapter, dw = getattr(model.layers, name).adapter, getattr(full.layers, name).weight
        found = getattr(ours.layers, name).adapter
        for mine, theirs in (
            (found.a, jnp.einsum("lro,loi->lri", adapter.b, dw)),
            (found.b, jnp.einsum("loi,lri->lro", dw, adapter.a)),
        ):
            expected = LORA.scale * theirs
            np.testing.assert_allclose(mine, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("mesh", ["1,4,1", "1,2,2", "2,2,2"])
def test_adapters_are_split_over_the_devices(mesh: str):
    model = trained(random_model())
    built = parse_mesh(mesh).build(jax.devices()[: np.prod([int(x) for x in mesh.split(",")])])
    placed = jax.device_put(model, model.shardings(built))
    expected = logits(model, IDS)
    atol = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(placed, IDS), expected, rtol=0, atol=atol)
    tp, fsdp = built.shape["tp"], built.shape["fsdp"]
    for name in linear_names(placed):
        adapter = getattr(placed.layers, name).adapter
        writes_hidden = name in ("o_proj", "down_proj")
        for matrix, is_of_hidden in ((adapter.a, not writes_hidden), (adapter.b, writes_hidden)):
            parts = fsdp if is_of_hidden else tp * fsdp
            *same, long = matrix.shape
            assert matrix.sharding.shard_shape(matrix.shape) == (*same, long // parts), name


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank=1, alpha=1.0, target=("qkv",)), "names 'qkv', which the model does not have"),
        (Lora(rank=17, alpha=1.0), "lora_rank is 17, and k_proj has a matrix of 16 x 32: lower it"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(lora: Lora, message: str):
    with pytest.raises(UserError, match=message):
        with_adapters(random_model(), lora, jax.random.key(0))


# Folders.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_pretrained(random_model(), folder)
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A folder of adapters."""
    save_pretrained(trained(from_pretrained(base)), tmp_path / "adapter", base=str(base))
    return tmp_path / "adapter"


@pytest.mark.parametrize("lora", [LORA, Lora(rank=2, alpha=8.0, target=("o_proj", "up_proj"))])
def test_adapters_come_back_as_they_were(base: Path, tmp_path: Path, lora: Lora):
    model = trained(from_pretrained(base), lora)
    save_pretrained(model, tmp_path, base=str(base))
    back = from_pretrained(tmp_path)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    assert eqx.tree_equal(back, model)
    assert base_model(str(tmp_path)) == str(base)


def test_adapters_are_float32_on_a_base_of_less(folder: Path):
    model = from_pretrained(folder, dtype=jnp.bfloat16)
    q_proj = model.layers.q_proj
    assert (q_proj.weight.dtype, q_proj.adapter.a.dtype) == (jnp.bfloat16, jnp.float32)


def test_saving_adapters_needs_the_name_of_the_model_beneath(tmp_path: Path):
    with pytest.raises(UserError, match=r"give base, .* or save model\.merged"):
        save_pretrained(trained(random_model()), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def change(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported, only 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": "all-linear"}, "only a list of names"),
        ({"target_modules": ["c_attn"]}, "is of another model: target_modules has 'c_attn'"),
        ({"r": None}, "r is None: expected a whole number"),
        ({"r": 0}, "has r=0 and lora_alpha=6.0: copy"),
        ({"r": 17}, "r is 17, and k_proj has a matrix of 16 x 32: ranks above"),
        ({"r": "3"}, "r is '3': expected a whole number"),
        ({"r": 10**5}, "r is 100000, and down_proj has a matrix"),
        ({"lora_alpha": 0}, "has r=3 and lora_alpha=0.0: copy"),
        ({"lora_alpha": -1}, "has r=3 and lora_alpha=-1.0: copy"),
        ({"base_model_name_or_path": ""}, "base_model_name_or_path is empty"),
        ({"lora_alpha": None}, "lora_alpha is None: expected a number"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None: expected a text"),
        ({"use_rslora": "no"}, "use_rslora is 'no': expected true or false"),
        ({"init_lora_weights": ["x"]}, "changes the model beneath"),
        (
            {"target_modules": ["lm_head", "q_proj"]},
            "'lm_head', and adapters of other",
        ),
        ({"target_modules": ["model.embed_tokens"]}, "'embed_tokens', and adapters of other"),
        ({"target_modules": ["input_layernorm"]}, "'input_layernorm', and adapters of other"),
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, "the module of one layer"),
        ({"target_modules": []}, "only a list of names"),
        ({"target_modules": [1]}, "only a list of names"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern.*merge the adapter with PEFT"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the model beneath"),
    ],
)
def test_adapters_of_another_kind_are_refused(folder: Path, fields: Any, message: str):
    change(folder, **fields)
    with pytest.raises(UserError, match=message):
        from_pretrained(folder)
    with pytest.raises(UserError, match=message):  # before any settings are advised
        check_adapter(str(folder), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS; run git lfs"),
        (b"<html>", "is a web page; download"),
        (b"", "header too small"),
    ],
)
def test_files_that_hold_no_adapters_are_named(folder: Path, content: bytes, message: str):
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(WeightsError, match=f"{WEIGHTS} cannot be read.*{message}"):
        from_pretrained(folder)


def test_adapters_with_other_targets_than_their_config_says_are_refused(folder: Path):
    change(folder, target_modules=["q_proj"])
    with pytest.raises(WeightsError, match=r"down_proj.lora_A.weight' is \(3, 48\), and .* none"):
        from_pretrained(folder)


def test_adapters_of_another_rank_than_their_config_says_are_refused(folder: Path):
    change(folder, r=4)
    with pytest.raises(WeightsError, match=r"adapter_config.json says r=4; copy both files of one"):
        from_pretrained(folder)


def test_adapters_of_an_adapter_are_refused(folder: Path, tmp_path: Path):
    """Their own folder is one, which was read for ever."""
    change(folder, base_model_name_or_path=str(folder))
    for read in (from_pretrained, TokenFiles.read):
        with pytest.raises(UserError, match="which is an adapter too: merge that into its model"):
            read(folder)


@pytest.mark.parametrize("beneath", ["o/a", "o/b", "o/a@main"])
def test_adapters_on_the_hub_of_adapters_are_refused(
    folder: Path, beneath: str, add_to_hub: Callable[..., None]
):
    """Be it this one, or one whose model is this one, which were downloaded again and again."""
    change(folder, base_model_name_or_path=beneath)
    add_to_hub("model", "o/a", folder, "0" * 40, "main")
    change(folder, base_model_name_or_path="o/a")
    add_to_hub("model", "o/b", folder, "1" * 40, "main")
    for read in (from_pretrained, lambda name: TokenFiles.read(model_folder(name))):
        with pytest.raises(UserError, match="which is an adapter too: merge that into its model"):
            read("o/a")


def test_adapters_of_another_base_are_refused(folder: Path, tmp_path: Path):
    other = Decoder.init(Qwen2Config(**{**SIZES, "hidden_size": 40}), jax.random.key(0))
    save_pretrained(other, tmp_path / "other")
    change(folder, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(WeightsError, match="the adapter was trained on another model"):
        from_pretrained(folder)


def test_a_whole_model_takes_the_place_of_an_adapter(folder: Path, base: Path):
    model = from_pretrained(folder)
    save_pretrained(model.merged(), folder)
    assert not from_pretrained(folder).has_adapters
    save_pretrained(model, folder, base=str(base))
    assert not (folder / "model.safetensors").exists()
    assert eqx.tree_equal(from_pretrained(folder), model)


def test_numbers_that_are_not_finite_are_refused(folder: Path):
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * np.nan}, folder / WEIGHTS)
    with pytest.raises(WeightsError, match=f"{name}' has numbers that are not finite"):
        from_pretrained(folder)


def test_a_missing_tensor_is_named(folder: Path):
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    save_file({key: x for key, x in tensors.items() if key != name}, folder / WEIGHTS)
    with pytest.raises(WeightsError, match=f"{name}' is missing"):
        from_pretrained(folder)


def test_training_goes_on_from_adapters_of_the_same_shape_alone(folder: Path):
    check_adapter(str(folder), LORA)
    check_adapter(str(folder), Lora(rank=3, alpha=6 / 3**0.5, rank_stabilized=True))
    check_adapter("tiny_qwen2", None)
    with pytest.raises(UserError, match="an adapter, and lora_rank is not set: set lora_rank to 3"):
        check_adapter(str(folder), None)
    with pytest.raises(UserError, match="set lora_rank to 3, lora_alpha to 6 and lora_target to"):
        check_adapter(str(folder), Lora(rank=4, alpha=32.0))
    with pytest.raises(UserError, match="is another adapter than the settings'"):
        check_adapter(str(folder), dataclasses.replace(LORA, target=("q_proj",)))


def test_an_adapter_without_the_rest_of_its_model_says_what_to_copy(folder: Path):
    (folder / "config.json").unlink()
    assert from_pretrained(folder).has_adapters  # finds the model beneath by its name
    with pytest.raises(UserError, match=r"without the rest of the model: copy config\.json"):
        model_folder(folder)
