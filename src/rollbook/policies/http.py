"""One URL that JSON is posted to, and every way the other side can misbehave as a kind of failure.

One aiohttp session serves thousands of requests in flight. Nothing is retried here, because the slot a
retry waits in belongs to others. A request goes to the origin that was named and to no other, with its body,
or not at all; of an answer no more is read than was allowed, counted after it was unpacked.
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
from rollbook.records.redact import redact_text, remember_secrets
from rollbook.rollouts.types import FailureKind, RolloutFailure

MAX_RESPONSE_BYTES = 64 << 20
_BODY_SHOWN, _BODY_READ = 300, 1 << 16
_REDIRECTS = frozenset({300, 301, 302, 303, 307, 308})
_KEEPING_THE_BODY = frozenset({307, 308})
_MOST_REDIRECTS = 5
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
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        refusal_hint: str = "",
    ) -> None:
        self.url, self._address = url, URL(url)
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        remember_secrets({"headers": self._headers, "url": url})  # a server may repeat what it was sent
        self._timeout = aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s)
        self._max_bytes = max_response_bytes
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
            response = await self._arrived(self._session, data)
            return response.status, response.headers, await self._body(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RolloutFailure(FailureKind.CONNECT, f"{self.url}: {describe_error(error)}") from None
        except TimeoutError:
            limit = self._timeout.total
            raise RolloutFailure(FailureKind.TIMEOUT, f"{self.url}: no answer within {limit} s") from None
        except aiohttp.InvalidURL as error:
            raise RolloutFailure(
                FailureKind.INVALID_REQUEST, f"{self.url}: {describe_error(error)}"
            ) from None
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise RolloutFailure(FailureKind.TRANSPORT, f"{self.url}: {describe_error(error)}") from None

    async def _arrived(self, session: aiohttp.ClientSession, data: bytes) -> aiohttp.ClientResponse:
        """The response of the address that takes the request, perhaps another one of the same origin."""
        address = self._address
        for _ in range(_MOST_REDIRECTS + 1):
            # No `async with`, which is three coroutines more: to read is to let go of the connection.
            response = await session.post(address, data=data, allow_redirects=False)
            location = response.headers.get("Location")
            if response.status not in _REDIRECTS or location is None:
                return response
            response.close()
            address = self._redirected(address, response.status, location)
        raise RolloutFailure(
            FailureKind.INVALID_REQUEST, f"{self.url}: redirected more than {_MOST_REDIRECTS} times"
        )

    def _redirected(self, address: URL, status: int, location: str) -> URL:
        try:
            # What else is in a URL (a password, a query) is nothing that a message should repeat.
            target = address.join(URL(location)).with_user(None)
            shown = str(target.with_query(None).with_fragment(None))
            is_elsewhere = target.origin() != self._address.origin()
        except ValueError:
            raise RolloutFailure(
                FailureKind.INVALID_REQUEST, f"{self.url} answered {status} with a Location that is no URL"
            ) from None
        if is_elsewhere:
            why = "which is another origin, so the request was not sent there"
        elif status not in _KEEPING_THE_BODY:
            why = "where the request would arrive without its body"
        else:
            return target
        raise RolloutFailure(
            FailureKind.INVALID_REQUEST,
            f"{self.url} answered {status}, a redirect to {shown}, {why}; if that is the right address, "
            "configure it",
            status=status,
        )

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """The whole body. A connection that is left with half of one on it is closed."""
        pieces, size, read = [], 0, response.content.readany
        try:
            while piece := await read():
                pieces.append(piece)
                size += len(piece)
                if size > self._max_bytes:
                    raise RolloutFailure(
                        FailureKind.BAD_ANSWER,
                        f"{self.url} answered {response.status} with more than {self._max_bytes} bytes "
                        "(max_response_bytes); the rest was not read",
                    )
        except BaseException:
            response.close()
            raise
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

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


def checked_url(url: str, key: str, *, has_key: bool = False) -> str:
    """The URL without its last slash; one that no request could be sent to is refused by its key.

    `has_key`: a key is sent with each request.
    """
    try:
        parsed = URL(url)
    except ValueError as error:
        raise UsageError(f"{key} {url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{key} {url!r} is not a URL; write it like http://127.0.0.1:8000/v1")
    if "?" in url or "#" in url:
        where, _, name = key.rpartition(".")
        keys = f"; a key belongs into {where}.api_key_env" if name == "base_url" else ""
        raise UsageError(
            f"{key} has a query or a fragment (from its ? or # on), which no request would carry; "
            f"write {parsed.with_query(None).with_fragment(None).with_user(None)}{keys}"
        )
    if has_key and parsed.user is not None:
        where = key.rpartition(".")[0]
        raise UsageError(
            f"{key} has a user or a password in it, and {where}.api_key_env names a key: only one of them "
            f"can be sent; write {parsed.with_user(None)} or leave out {where}.api_key_env"
        )
    return url.rstrip("/")


def check_limit(max_response_bytes: int, where: str) -> None:
    if max_response_bytes < 1:
        raise UsageError(f"{where}.max_response_bytes is {max_response_bytes}; it must be above 0")


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
    """The beginning of an answer. It is redacted before it is cut, which could cut a key in two."""
    return redact_text(body[:_BODY_READ].decode("utf-8", "replace"))[:_BODY_SHOWN]
