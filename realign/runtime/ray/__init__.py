"""Experiments whose models live in the processes of a Ray cluster (`runtime=ray`, extra `ray`)."""

from realign.runtime.ray.cluster import connected
from realign.runtime.ray.runtime import RayRuntime

__all__ = ["RayRuntime", "connected"]
