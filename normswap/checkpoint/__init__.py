"""Read a checkpoint as people have it, convert it into one that opens swapped, open that, and compare two.

From the bottom: ``errors``, ``files``, ``tensors``, ``distributed``, ``reading``, ``models``, ``writing``, the calls.
"""

from normswap.checkpoint.conversion import convert as convert
from normswap.checkpoint.conversion import save as save
from normswap.checkpoint.errors import CheckpointError as CheckpointError
from normswap.checkpoint.load import load_model as load_model
from normswap.checkpoint.load import verify as verify
from normswap.checkpoint.models import build_model as build_model
from normswap.checkpoint.reading import open_checkpoint as open_checkpoint
from normswap.checkpoint.tensors import same_tensors as same_tensors
