"""Messages travel unchanged, and nothing else than a message is accepted."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.servers.wire import Message, WireError, decode, encode

_MESSAGES = "distributary.servers._messages."
_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", ml_dtypes.bfloat16),
]


def _frame(message):
    return b"".join(encode(message))


def _with_header(header, buffers=b""):
    """A frame whose prefix is right."""
    frame = bytearray(_frame(Message("kind")))
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = header + bytes(-(24 + len(header)) % 64) + buffers
    frame[8:12] = len(header).to_bytes(4, "little")
    frame[16:24] = (24 + len(content)).to_bytes(8, "little")
    return bytes(frame[:24]) + content


def test_a_message_travels_unchanged():
    content = np.arange(48, dtype=np.uint8)
    numbers = np.arange(24, dtype=np.int32)
    arrays = [
        *((content % 2 if d == "bool" else content).view(d).reshape(3, -1) for d in _DTYPES),
        *(np.zeros(shape, np.float32) for shape in ((), (0, 3), (2, 0, 1), (1, 1, 1, 1))),
        # Every layout is sent in order.
        numbers.reshape(2, 3, 4).T,
        numbers[::-2],
        numbers.reshape(4, 6).astype(">i4"),
        np.broadcast_to(np.float32(3), (3, 2)),
        jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    ]
    fields = {"é\0": [None, True, -1, 1 << 80, 1.5e-300, '"\ud7ff', {"a": [[]]}], "": {}}
    blobs = [b"", bytes(range(256))]

    received = decode(_frame(Message("ü", fields, arrays, blobs)))

    assert (received.kind, received.fields, list(received.blobs)) == ("ü", fields, blobs)
    for array, expected in zip(received.arrays, arrays, strict=True):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype.newbyteorder("="))
        assert array.tobytes() == np.asarray(expected).astype(array.dtype).tobytes()


def test_arrays_are_copied_neither_to_be_sent_nor_when_they_have_come():
    array = np.arange(1 << 16, dtype=np.float32)

    buffers = encode(Message("kind", arrays=[array, array]))
    frame = bytearray().join(buffers)
    received = decode(frame).arrays

    assert sum(np.shares_memory(np.frombuffer(b, np.uint8), array) for b in buffers if b) == 2
    assert all(np.shares_memory(a, np.frombuffer(frame, np.uint8)) for a in received)
    assert not any(a.flags.writeable for a in received)
    addresses = [a.__array_interface__["data"][0] for a in received]
    assert (addresses[1] - addresses[0]) % 64 == 0


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("kind", arrays=[np.array(["a"])]), "dtype <U1 cannot be sent; expected one of"),
        (Message("kind", arrays=[np.zeros(1, "M8[s]")]), "cannot be sent"),
        (Message("kind", {"a": b"b"}), "message 'kind' are not JSON: .* bytes is not JSON"),
        (
            Message("kind", {"a": "x" * 2000}),
            "message 'kind' has 2056 bytes of JSON, expected 1000",
        ),
        (Message("kind", arrays=[np.zeros(9000)]), "has 72128 bytes, expected 64000 or fewer"),
        (Message("kind", blobs=[b""] * 11), "has 11 arrays and blobs, expected 10 or fewer"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(message, text, monkeypatch):
    for name, limit in (("MESSAGE_BYTES", 64000), ("HEADER_BYTES", 1000), ("BUFFERS", 10)):
        monkeypatch.setattr(f"{_MESSAGES}MAX_{name}", limit)

    with pytest.raises(WireError, match=text):
        encode(message)


_EMPTY = {"kind": "k", "fields": {}, "arrays": [], "blobs": []}


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "has 0 bytes, expected 24"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", "begins with b'GET '"),
        (b"dstr\2\0" + bytes(18), "has version 2 of the protocol, this process speaks 1"),
        (b"dstr\1\0\0\0\xff\xff\xff\xff" + bytes(12), "4294967295 bytes of JSON, expected 1048576"),
        (
            _frame(Message("k"))[:-1],
            "says that it has 128 bytes, of which 71 of the header, but 127",
        ),
        (_frame(Message("k")) + b"\0", "but 129"),
        (_with_header(b"\xff"), "UnicodeDecodeError"),
        (_with_header(b"[" * 100_000), "RecursionError"),
        (_with_header({"kind": "k"}), "KeyError: 'fields'"),
        (_with_header(_EMPTY | {"fields": []}), "another type"),
        (_with_header(_EMPTY | {"arrays": [["object", [1]]]}), "KeyError: 'object'"),
        (_with_header(_EMPTY | {"arrays": [["float32", [-1]]]}), "-1 is not a size"),
        (_with_header(_EMPTY | {"arrays": [["float32", [0, 2**40, 2**40]]]}), "is too large"),
        (_with_header(_EMPTY | {"arrays": [["float32", [1] * 33]]}), "is not a shape"),
        (_with_header(_EMPTY | {"arrays": [["float32", [1 << 40]]]}), "need 4398046511232 bytes"),
        (_with_header(_EMPTY, bytes(64)), "need 128 bytes, but it has 192"),
        (
            _with_header(_EMPTY | {"arrays": [["bool", [2]]]}, b"\1\2" + bytes(62)),
            "neither 0 nor 1",
        ),
        (_with_header(_EMPTY | {"blobs": [0] * 20_000}), "20000 arrays and blobs, expected 16384"),
    ],
)
def test_what_is_no_message_is_refused(frame, text):
    with pytest.raises(WireError, match=text):
        decode(frame)
