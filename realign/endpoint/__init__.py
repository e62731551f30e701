"""The policy as an OpenAI-compatible endpoint, and the capture of its calls as sequences for training."""

from realign.endpoint.capture import Capture, CapturedCall, CapturedSequence, Prompt
from realign.endpoint.limits import EndpointLimits
from realign.endpoint.renderer import Renderer
from realign.endpoint.scoring import Scorer
from realign.endpoint.server import Endpoint
from realign.endpoint.sessions import ServedPolicy, Session, Sessions

__all__ = [
    "Capture",
    "CapturedCall",
    "CapturedSequence",
    "Endpoint",
    "EndpointLimits",
    "Prompt",
    "Renderer",
    "Scorer",
    "ServedPolicy",
    "Session",
    "Sessions",
]
