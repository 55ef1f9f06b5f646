"""One URL that JSON is posted to, and every way the other side can misbehave as a kind of failure.

One aiohttp session serves thousands of requests in flight. Nothing is retried here, because the slot a
retry waits in belongs to others.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson
from yarl import URL

from rollbook.errors import UsageError
from rollbook.rollouts.types import FailureKind, RolloutFailure

_BODY_SHOWN = 300
_TRY_LATER = frozenset({408, 409, 425})


class Endpoint:
    """Posts a body, returns the bytes of a 200; anything else is a RolloutFailure."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 30.0,
        total_timeout_s: float | None = 3600.0,
        refusal_hint: str = "",
    ) -> None:
        self.url, self._address = url, URL(url)
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout = aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s)
        self._refusal_hint = refusal_hint  # said after a 401 or 403
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Mapping[str, Any]) -> bytes:
        status, headers, answer = await self._send(_encoded(body))
        if status != 200:
            raise self._refused(status, headers, answer)
        return answer

    def not_the_protocol(self, answer: bytes, error: BaseException) -> RolloutFailure:
        """The failure of an answer of 200 whose body is something else."""
        return RolloutFailure(
            FailureKind.BAD_ANSWER,
            f"{self.url} answered 200 with something else ({describe_error(error)}): {_shown(answer)!r}",
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, data: bytes) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            self._session = self._open_session()
        try:
            # No `async with`, which is three coroutines more: to read is to let go of the connection.
            response = await self._session.post(self._address, data=data)
            return response.status, response.headers, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RolloutFailure(FailureKind.CONNECT, f"{self.url}: {describe_error(error)}") from None
        except TimeoutError:
            limit = self._timeout.total
            raise RolloutFailure(FailureKind.TIMEOUT, f"{self.url}: no answer within {limit} s") from None
        except (aiohttp.TooManyRedirects, aiohttp.InvalidURL) as error:
            raise RolloutFailure(
                FailureKind.INVALID_REQUEST, f"{self.url}: {describe_error(error)}"
            ) from None
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise RolloutFailure(FailureKind.TRANSPORT, f"{self.url}: {describe_error(error)}") from None

    def _open_session(self) -> aiohttp.ClientSession:
        # The scheduler bounds what is in flight; a second bound here would only hide requests in a queue.
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _refused(self, status: int, headers: Mapping[str, str], body: bytes) -> RolloutFailure:
        message = f"{self.url} answered {status}: {_shown(body)}"
        if status in (401, 403) and self._refusal_hint:
            message += f" ({self._refusal_hint})"
        if status == 404:
            message += " (is the base_url right, most end in /v1, and does the server have this model?)"
        wait = retry_after(headers)
        if wait is not None:
            message += f" (asks to wait {wait:.1f} s)"
        return RolloutFailure(kind_of_status(status), message, status=status, retry_after=wait)


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # a lone surrogate; or a whole number past 64 bits, which is JSON all the same
        pass
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RolloutFailure(FailureKind.INVALID_REQUEST, f"the request is not JSON: {error}") from None


def kind_of_status(status: int) -> FailureKind:
    """The kind of failure that an HTTP status other than 200 is."""
    if status == 429:
        return FailureKind.RATE_LIMIT
    if status >= 500 or status in _TRY_LATER:
        return FailureKind.SERVER_ERROR
    return FailureKind.INVALID_REQUEST


def checked_url(url: str, key: str) -> str:
    """The URL without its last slash; one that no request could be sent to is refused by its key."""
    try:
        parsed = URL(url)
    except ValueError as error:
        raise UsageError(f"{key} {url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{key} {url!r} is not a URL; write it like http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def check_timeouts(connect_timeout_s: float, total_timeout_s: float | None, where: str) -> None:
    """Refuse, by its key, one that nothing can be done within, or that is taken for no limit at all."""
    if not 0 < connect_timeout_s < math.inf:
        raise UsageError(
            f"{where}.connect_timeout_s is {connect_timeout_s:g}; it must be above 0, such as 30"
        )
    if total_timeout_s is not None and not 0 < total_timeout_s < math.inf:
        raise UsageError(
            f"{where}.total_timeout_s is {total_timeout_s:g}; it must be above 0, or null for no limit"
        )


def bearer(api_key_env: str | None, key: str) -> dict[str, str]:
    """The Authorization header, from an environment variable: keys are never in a file."""
    if api_key_env is None:
        return {}
    secret = os.environ.get(api_key_env)
    if not secret:
        raise UsageError(f"{key} names {api_key_env}, which is not set; type: export {api_key_env}=...")
    if not secret.isprintable() or secret != secret.strip():  # a key read from a file of another system
        raise UsageError(
            f"{key} names {api_key_env}, which holds a line end, a blank or the like that no key has; type: "
            f'export {api_key_env}="$(printf %s "${api_key_env}" | tr -d \'[:cntrl:][:space:]\')"'
        )
    return {"Authorization": f"Bearer {secret}"}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as the server says: milliseconds, seconds, or an HTTP date."""
    milliseconds, value = headers.get("retry-after-ms"), headers.get("retry-after")
    wait = _number(milliseconds)
    if wait is not None:
        return max(0.0, wait / 1000)
    if value is None:
        return None
    if (wait := _number(value)) is not None:
        return max(0.0, wait)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _number(text: str | None) -> float | None:
    """A finite one: some have asked to wait for `inf`, or for 400 digits of seconds."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(body: bytes) -> str:
    return body[:_BODY_SHOWN].decode("utf-8", "replace")
