"""How each convolution with a norm behind it is computed: by what is right on the example inputs and fastest there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from normswap import modules
from normswap.forwards.replaced import Replaced
from normswap.plan import Match, Plan, Swap
from normswap.regions.compare import compare_region, holder_of
from normswap.regions.foldings import by_default, foldings_of, without_convolution
from normswap.regions.helper import Fused, make_helper
from normswap.regions.install import compiled_of, with_helpers
from normswap.regions.rewrite import Compiled, Helper
from normswap.regions.spec import Region
from normswap.sites import preserved
from normswap.timing.candidate import Code, Recorder, Use
from normswap.timing.choose import Waiting
from normswap.timing.decision import machine_for, takes_gradients
from normswap.timing.hidden import Cost, costs

_MARGIN = 0.03
"""By so much, as a share, must a way be the faster one to be taken before one that stands earlier."""
_COMPARED_PIECES = 1
