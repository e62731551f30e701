"""`ApiError`: an error of a request, in the format of the OpenAI API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that the endpoint does not serve.

    Attributes:
        status: HTTP status.
        message: explanation for the client.
        param: parameter of the request that caused the error; None if no single one did.
        code: machine-readable cause.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> ApiError:
    """Return the error of a parameter with an invalid value."""
    return ApiError(400, f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")
