"""The policy as an OpenAI-compatible endpoint, and the capture of its calls as sequences for training."""

from realign.endpoint.limits import EndpointLimits
from realign.endpoint.renderer import Renderer
from realign.endpoint.scoring import Scorer
from realign.endpoint.server import Endpoint
from realign.endpoint.sessions import ServedPolicy, Sessions

__all__ = [
    "Endpoint",
    "EndpointLimits",
    "Renderer",
    "Scorer",
    "ServedPolicy",
    "Sessions",
]
