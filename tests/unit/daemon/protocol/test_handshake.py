"""The opening handshake: the RFC's example, and each refusal."""

from __future__ import annotations

import pytest
from support.protocol_drive import head_of

from seedance.daemon.protocol.handshake import HandshakeRefused, accept_response_headers, choose_subprotocol

# The key is RFC 6455 §1.2's.
FIELDS = {
    "Host": "a",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}


def request(line: str = "GET / HTTP/1.1", **changes: str | None) -> bytes:
    """Return a good opening request with fields changed or, by None, left out."""
    fields = FIELDS | {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [line, *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_accepts_the_example_of_the_rfc() -> None:
    assert accept_response_headers(head_of(request())) == [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
    ]


@pytest.mark.parametrize(
    ("offer", "chosen"),
    [
        (None, None),
        ("chat", None),
        ("seedance.fm.v1", "seedance.fm.v1"),
        ("key.abc, seedance.fm.v1,seedance.json.v1", "seedance.json.v1"),
        ("SEEDANCE.FM.V1", None),
    ],
)
def test_chooses_by_our_preference(offer: str | None, chosen: str | None) -> None:
    head = head_of(request(Sec_WebSocket_Protocol=offer))
    ours = ["seedance.json.v1", "seedance.fm.v1"]
    assert choose_subprotocol(head, ours) == chosen
    assert dict(accept_response_headers(head, ours)).get("Sec-WebSocket-Protocol") == chosen


@pytest.mark.parametrize(
    ("data", "code", "fields"),
    [
        (request(Upgrade=None), 426, {"Upgrade": "websocket"}),
        (request(Connection="keep-alive"), 426, {"Upgrade": "websocket"}),
        (request(Sec_WebSocket_Version="8"), 426, {"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}),
        (request(Sec_WebSocket_Version=None), 426, {"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}),
        (request(Sec_WebSocket_Key=None), 400, {}),
        (request(Sec_WebSocket_Key="c2hvcnQ="), 400, {}),
        (request(Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ"), 400, {}),
        (request(Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZ!=="), 400, {}),
        (request(Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jé=="), 400, {}),
        (request(Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="), 400, {}),
        (request("POST / HTTP/1.1"), 400, {}),
        (request("GET / HTTP/1.0"), 400, {}),
        (request(Content_Length="1"), 400, {}),
        (request(Transfer_Encoding="chunked"), 400, {}),
    ],
)
def test_refuses(data: bytes, code: int, fields: dict[str, str]) -> None:
    with pytest.raises(HandshakeRefused, match="^cannot ") as caught:
        accept_response_headers(head_of(data))
    assert (caught.value.code, dict(caught.value.headers)) == (code, fields)
