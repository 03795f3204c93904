"""Errors in Anthropic's form, at the routes of its Messages API; in OpenAI's at all others."""

from typing import Any

from starlette.responses import Response

from jaxpaged.serve.replies import ApiError, reply

ROOT = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OVERLOADED = 529  # Anthropic's status where others have 503


def is_messages(path: str) -> bool:
    """Tell whether a path is one of the Messages API."""
    return path == ROOT or path.startswith(f"{ROOT}/")


def message_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body if request_id is None else body | {"request_id": request_id}


def error_reply(error: ApiError, path: str, request_id: str | None = None) -> Response:
    """Return the response to a request at this path that ends by an error."""
    if not is_messages(path):
        return error.response()
    status = OVERLOADED if error.status == 503 else error.status
    return reply(message_error(error, request_id), status, error.headers)
