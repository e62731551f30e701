"""Secrets: which environment variables and parts of URLs look like one, who may use them, and how messages hide them.

Reward workers and programs of a model inherit no secret variable. A URL in a config must not contain a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, quote, unquote_plus, urlsplit

from realign.errors import ConfigError
from realign.text import shorten, visible

_SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|^PGPASS"  # anywhere in a name
    r"|(^|_)(TOKENS?|KEYS?|AUTH|PAT|COOKIE|SIG|SIGNATURE)(_|$)|_PWD$"  # as a separate word
    r"|^(AWS|AZURE)_"
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def _looks_secret(name: str) -> bool:
    """Return whether the name of a variable or parameter looks like that of a secret."""
    return _SECRET_NAME.search(name.upper()) is not None


def secret_variables(environment: Mapping[str, str], keep: Sequence[str] = ()) -> list[str]:
    """Return the names of the variables that look like secrets, except those in `keep`.

    A variable looks like a secret if its name has a word such as TOKEN, KEY, SECRET or PASSWORD, or starts with AWS_ or
    AZURE_. So does a variable whose value is a URL with a password, except proxies, which the workers may need.
    """
    return sorted(
        name
        for name, value in environment.items()
        if name not in keep
        and (_looks_secret(name) or (_URL_WITH_PASSWORD.search(value) and not name.lower().endswith("_proxy")))
    )


def without_secrets(environment: Mapping[str, str], keep: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment without `secret_variables`."""
    dropped = set(secret_variables(environment, keep))
    return {name: value for name, value in environment.items() if name not in dropped}


def drop_secrets(keep: Sequence[str]) -> None:
    """Remove the variables that look like secrets from this process, and so from the processes it starts."""
    for name in secret_variables(os.environ, keep):
        del os.environ[name]


ALLOWED_VARIABLES = "REALIGN_URL_VARIABLES"
"""Environment variable: names, separated by commas, of the secrets that may be part of the URL of such a server. No
config can set it, so a config from another user cannot send a secret to a server."""

_VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}")
_USERINFO = re.compile(r"(?<=//).*@", re.DOTALL)
_PARAMETER = re.compile(r"([?&;#])([^=&;#]+)=([^&;#]*)")
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_OPTION = re.compile(r"(--?[A-Za-z][\w-]*(?:=|\s+)|\b[A-Za-z_]\w*=)(\S+)")
_LONGEST = 300
_LONGEST_NUMBER = 6


def allowed_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the secret variables that may be part of a URL."""
    return [name.strip() for name in environment.get(ALLOWED_VARIABLES, "").split(",") if name.strip()]


def redact(url: str) -> str:
    """Return a URL with `***` in place of the user, the password and secret query parameters; escaped and shortened."""
    hidden = _PARAMETER.sub(_redact_parameter, _USERINFO.sub("***@", url))
    return visible(shorten(hidden, _LONGEST)).replace("\n", "\\n").replace("\t", "\\t")


def redact_text(text: str) -> str:
    """Return a text with `***` in place of the credentials in its URLs and of the values of options such as --api-key.

    Unlike `redact`, it leaves everything else as it is.
    """
    hidden = _ADDRESS.sub(lambda match: _PARAMETER.sub(_redact_parameter, _USERINFO.sub("***@", match[0])), text)
    return _OPTION.sub(_redact_option, hidden)


def _redact_option(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}***" if _secret_parameter(name.strip(" =-"), value) else match[0]


def _redact_parameter(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    return match[0] if _VARIABLE.fullmatch(value) or not _secret_parameter(name, value) else f"{mark}{name}=***"


def _secret_parameter(name: str, value: str) -> bool:
    """Return whether a query parameter looks like a secret. Short numbers, as in `max_tokens=100`, are none."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]", "_", unquote_plus(name))
    return _looks_secret(words) and not (value.isdigit() and len(value) <= _LONGEST_NUMBER)


def check_url(url: str, kind: str = "reward function") -> None:
    """Check the URL of a server.

    Args:
        url: the URL.
        kind: what the URL is, for messages.

    Raises:
        ConfigError: the URL is invalid, or contains credentials. The message does not contain them.
    """
    what = f"{kind} '{redact(url)}'"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "$" not in parts.netloc
    except ValueError:
        valid = False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{what}: invalid URL. Use the form http://host:port/path, in ASCII and without spaces.")
    if "@" in parts.netloc:
        raise ConfigError(
            f"{what}: the URL contains credentials, which would be written to config.yaml. Remove them. A "
            f"{'tool' if 'MCP' in kind else 'reward function'} in Python can send a key from the environment."
        )
    # Some servers also separate parameters by semicolons.
    for query in (parts.query.replace(";", "&"), parts.fragment):
        for name, value in parse_qsl(query, keep_blank_values=False):
            if _secret_parameter(name, value) and not _VARIABLE.fullmatch(value):
                raise ConfigError(
                    f"{what}: the query parameter {name!r} looks like a secret, which would be written to "
                    f"config.yaml. Write {name}=${{oc.env:NAME}}, and set {ALLOWED_VARIABLES}=NAME in the environment."
                )


def fill_url(
    url: str, environment: Mapping[str, str] = os.environ, kind: str = "reward function"
) -> tuple[str, list[str]]:
    """Insert the values of `${oc.env:NAME}`, and return the URL for requests and the secrets in it.

    Args:
        url: the URL.
        environment: the variables.
        kind: what the URL is, for messages.

    Raises:
        ConfigError: a variable is not set, or is a secret that `ALLOWED_VARIABLES` does not list.
    """
    secrets: list[str] = []
    refused = secret_variables(environment, allowed_variables(environment))

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in refused:
            raise ConfigError(refusal(f"{kind} '{redact(url)}'", name))
        if name not in environment:
            raise ConfigError(f"{kind} '{redact(url)}': the environment variable {name} is not set. Set it.")
        secrets.append(environment[name])
        return quote(environment[name], safe="")

    return _VARIABLE.sub(value, url), secrets


def refusal(what: str, name: str) -> str:
    """Return the message for a secret variable that may not be part of a config value or a URL."""
    return (
        f"{what}: the environment variable {name} looks like a secret, and a config cannot read secrets. For the URL "
        f"of a reward or MCP server, set {ALLOWED_VARIABLES}={name} in the environment of the run."
    )
