"""Choice of the best attention over whole sequences for a kind of device."""

import jax

from grpo_eqx.models.causal_attention.base import CausalAttention
from grpo_eqx.models.causal_attention.blocked import BlockedAttention
from grpo_eqx.models.causal_attention.cudnn import CudnnAttention
from grpo_eqx.models.causal_attention.mosaic_tpu import MosaicAttention

# Fits well in a core's cache: 128 took up to 1.8 times as long, 256 up to 3 times.
_CPU_BLOCK = 64
# XLA shares out the products of wide blocks among cores. On two, the layers' forward and backward
# pass took 0.83 times as long with prompts of 512 tokens, 0.94 with 256, and as long with 64.
_CPU_BLOCKS_PER_WIDE = 4
_FIRST_WITH_FLASH_ATTENTION = 8.0  # compute capability


def best_attention(mesh: jax.sharding.Mesh) -> CausalAttention:
    """Selects the devices' own kernels where there are any, or blocks in plain JAX."""
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return MosaicAttention(mesh)
    if device.platform == "cpu":
        return BlockedAttention(_CPU_BLOCK, _CPU_BLOCKS_PER_WIDE)
    is_nvidia = "NVIDIA" in device.device_kind
    if is_nvidia and float(device.compute_capability) >= _FIRST_WITH_FLASH_ATTENTION:
        return CudnnAttention(mesh)
    return BlockedAttention()
