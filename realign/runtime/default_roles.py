"""Defaults of roles: roles that an interface needs and the config does not define, and the tokenizer of the actor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from realign.api import DataflowGraph, ModelInterface, ModelSpec, Role, RoleModel
from realign.engines.shared_model import SharedModel
from realign.errors import ConfigError


@dataclass(frozen=True)
class Roles:
    """The interfaces and models of a run by role, with a description of each role that was added."""

    interfaces: dict[str, ModelInterface]
    models: dict[str, ModelSpec]
    filled: dict[str, str] = field(default_factory=dict)


def with_default_roles(
    graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], models: Mapping[str, ModelSpec]
) -> Roles:
    """Return interfaces and models, with defaults for undefined roles that the graph uses; existing ones are kept.

    Raises:
        ConfigError: two roles declare different defaults for a role that the config does not define.
    """
    completed = Roles(dict(interfaces), dict(models))
    used = tuple(dict.fromkeys(rpc.model for rpc in graph.rpcs))
    asked: dict[str, tuple[str, Role]] = {}
    owners = [role for role in used if role in completed.interfaces]
    for owner in owners:  # an added role may itself need further roles
        for role, default in completed.interfaces[owner].roles().items():
            if role not in used:
                continue
            first, other = asked.setdefault(role, (owner, default))
            if role not in interfaces and other.interface != default.interface:
                raise ConfigError(
                    f"interfaces.{role}: interfaces.{first} and interfaces.{owner} declare different defaults for this "
                    f"role. Define interfaces.{role} in the config."
                )
            if role not in completed.interfaces:
                owners.append(role)
            _fill(completed, role, owner, default)
    return completed


def _fill(roles: Roles, role: str, owner: str, default: Role) -> None:
    parts = []
    if role not in roles.interfaces:
        roles.interfaces[role] = default.interface
        parts.append(type(default.interface).__name__)
    if role not in roles.models and roles.interfaces[role].needs_engine:
        spec = _model(default.model, owner, roles.models)
        if spec is not None:
            roles.models[role] = spec
            parts.append(spec.describe() if isinstance(spec, SharedModel) else f"frozen copy of the start of {owner}")
    if parts:
        roles.filled[role] = ", ".join(parts)


def _model(kind: RoleModel, owner: str, models: Mapping[str, ModelSpec]) -> ModelSpec | None:
    """Return the spec of a role's default model; None if the role or its owner has no model."""
    spec = models.get(owner)
    if isinstance(spec, SharedModel):
        owner, spec = spec.of, models.get(spec.of)
    if spec is None or kind is RoleModel.none:
        return None
    return SharedModel(owner) if kind is RoleModel.shared else spec.frozen_start(owner)


def lead_of(roles: Iterable[str], models: Mapping[str, ModelSpec]) -> str | None:
    """Return the role that tokenizes the data: "actor", or else the first of `roles` with a model; None without any."""
    with_model = [role for role in roles if role in models]
    return "actor" if "actor" in with_model else next(iter(with_model), None)


def with_tokenizer_of(lead: str | None, models: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return models that use the tokenizer of the role `lead`, except those whose spec names a tokenizer."""
    source = models[lead].tokenizer_source(lead) if lead is not None else None
    if source is None:
        return dict(models)
    return {role: spec if role == lead else spec.with_tokenizer(source) for role, spec in models.items()}


__all__ = ["Roles", "lead_of", "with_default_roles", "with_tokenizer_of"]
