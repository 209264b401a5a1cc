"""Read a checkpoint as people have it, convert it into one that opens swapped, open that, and compare two.

Read from the bottom: ``files`` (all or none), ``archive`` and ``layouts`` (what is refused before it is read),
``tensors`` (one file), ``nested``, ``distributed`` and ``reading`` (what people have), ``construct``, ``factory`` and
``hub`` (its model), ``manifest``, ``writing``, and at the top ``convert``, ``save``, ``load`` and ``verify``.
"""

from __future__ import annotations

from normswap.checkpoint.convert import convert, versions
from normswap.checkpoint.errors import CheckpointError
from normswap.checkpoint.factory import build_model
from normswap.checkpoint.load import load_model
from normswap.checkpoint.manifest import MANIFEST
from normswap.checkpoint.reading import Checkpoint, open_checkpoint
from normswap.checkpoint.save import save
from normswap.checkpoint.tensors import same_tensors, write_tensors
from normswap.checkpoint.verify import verify

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "CheckpointError",
    "build_model",
    "convert",
    "load_model",
    "open_checkpoint",
    "same_tensors",
    "save",
    "verify",
    "versions",
    "write_tensors",
]
