"""Finds parameters that ranks initialised differently, before a mix of them is trained.

Every rank samples at most `MAX_SAMPLES` elements of each parameter at the same places and hashes
them; the digests are compared in one small collective.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

import hp_comm
from hp_fully_shard.errors import FullyShardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_mesh import DeviceMesh

MAX_SAMPLES = 4096
DIGEST_BYTES = 8


def check_same_values(named: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """Raise unless every rank of the mesh holds the same parameters.

    Args:
        named: Names and whole parameters; those on the meta device hold nothing to compare.
        mesh: The 1-D mesh; every rank calls this with the same names.

    Raises:
        FullyShardError: Ranks differ in number, name, shape or values of parameters; the message
            names the first such parameter and the ranks that differ from the first rank.
    """
    held = [(name, parameter) for name, parameter in named if not parameter.is_meta]
    if mesh.size() == 1 or not held:
        return
    own = b"".join(_digest(name, parameter) for name, parameter in held)
    everyone = hp_comm.communicator(mesh).all_gather_bytes(own)
    if all(other == everyone[0] for other in everyone):
        return
    for index, (name, _) in enumerate(held):
        part = slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES)
        ranks = [r for r, other in zip(mesh.ranks, everyone, strict=True)
                 if other[part] != everyone[0][part]]  # fmt: skip
        if ranks:
            raise FullyShardError(
                f"parameter {name!r} differs between rank {mesh.ranks[0]} and ranks {ranks}: they "
                f"would be mixed. Call torch.manual_seed(same number) on every rank before the "
                f"model is built, or load the same weights."
            )
    raise FullyShardError(
        f"ranks {mesh.ranks} pass different numbers of parameters to fully_shard. Build the same "
        f"model and make the same calls on every rank."
    )


def _digest(name: str, parameter: nn.Parameter) -> bytes:
    flat = parameter.detach().reshape(-1)
    step = max(1, -(-flat.numel() // MAX_SAMPLES))
    sample = flat[::step].contiguous().cpu()
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
    digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.digest()
