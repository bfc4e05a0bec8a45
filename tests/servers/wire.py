"""The protocol below the public names, for tests of what others may send."""
# ruff: noqa: F401 - tests import the names from here

import random

import ml_dtypes
import numpy as np

from distributary.servers._grpc import ROLES, Credentials, GrpcLink, GrpcServer, make_certificates
from distributary.servers._links import InProcessLink
from distributary.servers._messages import Assembly, Message, WireError, decode, encode, split
from distributary.servers._plans import (
    ProgramCache,
    Update,
    export_divided,
    export_function,
    export_per_device,
)
from distributary.servers._rows import UpdatedRows


def damaged_frames(num_frames):
    """Random bytes, and a message of which bytes were changed, taken out or put in."""
    generator = random.Random(1)
    message = Message(
        "push",
        {"step": 3, "names": ["a", None, 2.5]},
        [np.ones((2, 3), np.float32), np.array([True, False]), np.ones(1, ml_dtypes.bfloat16)],
        [b"program"],
    )
    frame = b"".join(encode(message))
    for i in range(num_frames):
        if i % 4 == 0:
            yield generator.randbytes(i % 97)
            continue
        damaged = bytearray(frame)
        position = int(generator.random() * 200)  # where the structure is
        damaged[position : position + i % 3] = generator.randbytes(i // 3 % 3)
        yield bytes(damaged)
