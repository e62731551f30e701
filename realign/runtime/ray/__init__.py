"""Ray runtime: the models run in worker processes of a Ray cluster (`runtime=ray`, extra `ray`)."""

from realign.runtime.ray.cluster import connected
from realign.runtime.ray.ray_runtime import RayRuntime

__all__ = ["RayRuntime", "connected"]
