"""Keep secrets of the environment out of configs: `${oc.env:NAME}` cannot read a variable that looks like a secret."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from realign.config.errors import ConfigError
from realign.rewards.pool.limits import secret_variables
from realign.rewards.pool.urls import allowed_variables, check_url, refusal

_NO_DEFAULT = object()


class SecretRefused(ConfigError):
    """A value of a config reads a variable of the environment that looks like a secret."""


@contextmanager
def without_secrets() -> Iterator[None]:
    """Let `${oc.env:NAME}` refuse secrets while configs are resolved in this context.

    In the URL of a reward server, a secret that `REALIGN_URL_VARIABLES` lists stays an interpolation. The reward
    function inserts its value, so that no config contains it.

    Raises:
        SecretRefused: in place of OmegaConf's exception, if a value reads a secret.
    """
    refused: list[str] = []

    def env(name: str, default: Any = _NO_DEFAULT, *, _node_: Node) -> Any:
        if name in secret_variables(os.environ):
            text, key = _node_._value(), _node_._get_full_key("")
            is_url = isinstance(text, str) and text.startswith(("http://", "https://")) and key.endswith(".function")
            if is_url and name in allowed_variables(os.environ):
                return f"${{oc.env:{name}}}"
            refused.append(refusal(key or "an override", name))
            raise SecretRefused(refused[-1])
        return oc.env(name) if default is _NO_DEFAULT else oc.env(name, default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield
    except OmegaConfBaseException as error:
        if refused:
            raise SecretRefused(refused[0]) from error
        raise
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def check_no_secrets(composed: DictConfig, values: Iterable[tuple[str, Any]]) -> None:
    """Check that no value reads a secret, and that the URLs of reward servers contain no credentials.

    Ignores other errors of interpolations, which resolving the config reports.

    Args:
        composed: config without the `hydra` node.
        values: key and unresolved value of every leaf.

    Raises:
        ConfigError: a value contains or reads a secret. The message does not contain the secret.
    """
    for key, found in values:
        value = found
        if isinstance(found, str) and "${" in found:
            with suppress(OmegaConfBaseException), without_secrets():
                value = OmegaConf.select(composed, key)
        if key.endswith(".function") and isinstance(value, str) and "://" in value:
            try:
                check_url(value)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
