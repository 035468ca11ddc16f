"""Device meshes, and how arrays are split over their axes."""

from grpo_eqx.sharding.layout_report import LayoutReport as LayoutReport
from grpo_eqx.sharding.mesh import AutoMesh as AutoMesh
from grpo_eqx.sharding.mesh import ExplicitMesh as ExplicitMesh
from grpo_eqx.sharding.mesh import HostLocalMesh as HostLocalMesh
from grpo_eqx.sharding.mesh import Mesh as Mesh
from grpo_eqx.sharding.mesh import parse_mesh as parse_mesh
from grpo_eqx.sharding.rollout_layout import RolloutLayout as RolloutLayout
from grpo_eqx.sharding.rollout_sharding import LegacySharding as LegacySharding
from grpo_eqx.sharding.rollout_sharding import MaxTextSharding as MaxTextSharding
from grpo_eqx.sharding.rollout_sharding import ReplicatedSharding as ReplicatedSharding
from grpo_eqx.sharding.rollout_sharding import RolloutSharding as RolloutSharding
from grpo_eqx.sharding.rollout_sharding import TensorSharding as TensorSharding
from grpo_eqx.sharding.rollout_sharding import parse_rollout_sharding as parse_rollout_sharding
from grpo_eqx.sharding.rules import batch_sharding as batch_sharding
from grpo_eqx.sharding.rules import parameter_sharding as parameter_sharding
