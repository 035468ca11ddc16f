"""Meshes, and what is split over their axes."""

from grpo_eqx.sharding.distributed import initialize as initialize
from grpo_eqx.sharding.distributed import is_main as is_main
from grpo_eqx.sharding.mesh import AutoMesh as AutoMesh
from grpo_eqx.sharding.mesh import ExplicitMesh as ExplicitMesh
from grpo_eqx.sharding.mesh import HostLocalMesh as HostLocalMesh
from grpo_eqx.sharding.mesh import Mesh as Mesh
from grpo_eqx.sharding.mesh import parse_mesh as parse_mesh
