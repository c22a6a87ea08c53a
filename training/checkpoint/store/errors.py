"""Classification of an object store's errors, by HTTP status, S3's code and names of exceptions, since the libraries
that raise them (botocore, aiohttp, gcsfs, adlfs) need not be installed; and descriptions without secrets."""

import errno
from collections.abc import Iterator, Mapping
from typing import Any

from config.redact import redact
from config.secrets import ADVICE

_TRANSIENT_CODES = {
    *("InternalError", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"),
    *("RequestLimitExceeded", "RequestTimeout", "OperationAborted", "IncompleteBody", "BadDigest", "NoSuchUpload"),
    *("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
}
# Python's own ConnectionError and TimeoutError are recognised by their names instead.
_TRANSIENT_ERRNOS = errno.EAGAIN, errno.EBUSY, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH
# Exceptions of botocore, aiohttp, urllib3, requests and azure-core; a base class covers those that derive from it.
_TRANSPORT = {
    *("ClientConnectionError", "ClientPayloadError", "ConnectionError", "HTTPClientError", "IncompleteRead"),
    *("IncompleteReadError", "ProtocolError", "ResponseParserError", "ServiceRequestError"),
    *("ServiceResponseError", "TimeoutError", "gaierror"),
}
_NETWORK = "check the network and checkpoint.storage_options.endpoint_url"
_RIGHTS = "check that these credentials may read, write, list and delete there"
_ADVICE_FOR: dict[str | int, str] = {
    401: f"check the credentials: {ADVICE}",
    403: f"{_RIGHTS}, and use the key named for encryption",
    "NoSuchBucket": "create the bucket, or correct checkpoint.dir",
    "NoCredentialsError": ADVICE,
    "ProfileNotFound": "check AWS_PROFILE and storage_options.profile",
    "PermissionError": _RIGHTS,
    **dict.fromkeys(("EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "gaierror"), _NETWORK),
}


class StoreError(OSError):
    """A store operation failed, retries included. One line: the URL, the operation, the error, what to do."""


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed: 5xx, throttling, a time-out, a broken connection."""
    for cause in _causes(error):
        status, code = _status(cause), _code(cause)
        if code in _TRANSIENT_CODES or _TRANSPORT & {kind.__name__ for kind in type(cause).__mro__}:
            return True
        if status is not None:
            return status in (408, 425, 429) or (status >= 500 and status != 501)
    return any(isinstance(cause, OSError) and cause.errno in _TRANSIENT_ERRNOS for cause in _causes(error))


def is_missing(error: BaseException) -> bool:
    """Whether the object is missing although its bucket exists."""
    return isinstance(error, FileNotFoundError) and not any(_code(cause) == "NoSuchBucket" for cause in _causes(error))


def describe(error: BaseException) -> str:
    """The error in one line without credentials, and what to do about it."""
    text = next((message for cause in _causes(error) if (message := str(cause))), type(error).__name__)
    code = next((str(code) for cause in _causes(error) if (code := _code(cause))), "")
    if code and not code.isdigit() and code not in text:
        text = f"{code}: {text}"
    keys = [key for cause in _causes(error) for key in (_code(cause), _status(cause), type(cause).__name__)]
    advice = next((_ADVICE_FOR[key] for key in keys if key in _ADVICE_FOR), None)
    line = redact(" ".join(text.split()))[:300]
    return f"{line}; {advice}" if advice else line


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _response(error: BaseException) -> Mapping[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, Mapping) else {}


def _status(error: BaseException) -> int | None:
    """The HTTP status, from where botocore, aiohttp (status), azure-core (status_code) or gcsfs (code) has it."""
    found = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status", "status_code", "code"):
        found = found if found is not None else getattr(error, name, None)
    try:
        return int(found) if found is not None and 300 <= int(found) < 600 else None
    except (TypeError, ValueError):
        return None


def _code(error: BaseException) -> str | None:
    code = _response(error).get("Error", {}).get("Code")
    return str(code) if code else None
