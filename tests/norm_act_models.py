"""BatchNorms that end in an activation, as timm's do, and what only looks like one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NormAct(nn.BatchNorm2d):
    """timm's way: the forward of torch.nn's class, written out, and two children."""

    def __init__(self, act: nn.Module | None = None, drop: nn.Module | None = None, channels: int = 6) -> None:
        super().__init__(channels)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")

        if self.momentum is None:
            exponential_average_factor = 0.0
        else:
            exponential_average_factor = self.momentum

        if self.training and self.track_running_stats:  # noqa: SIM102
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    exponential_average_factor = 1.0 / float(self.num_batches_tracked)
                else:
                    exponential_average_factor = self.momentum

        r"""
        Decide whether the mini-batch stats should be used for normalization rather than the buffers.
        """
        if self.training:
            bn_training = True
        else:
            bn_training = (self.running_mean is None) and (self.running_var is None)

        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            bn_training,
            exponential_average_factor,
            self.eps,
        )
        x = self.drop(x)
        x = self.act(x)
        return x


class Short(NormAct):
    """The same in eval, in other words."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, momentum=0.1, training=False, eps=self.eps
        )
        return self.act(self.drop(y))


class Alone(NormAct):
    """Ends in the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps
        )


class Doubled(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps)
        return self.act(x)


class DoubledBehind(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps)
        return self.act(x) * 2


class OfTheInput(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps)
        y = self.drop(y)
        return self.act(x)


class AnotherEps(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, 0.5)
        return self.act(x)


class Swapped(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.bias, self.weight, False, self.momentum, self.eps)
        return self.act(x)


class ByTheBatch(NormAct):
    """In eval too."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, None, None, self.weight, self.bias, True, self.momentum, self.eps)
        return self.act(x)


class Unless(NormAct):
    """By a flag that nobody knows of."""

    plain = False

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return x
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps)
        return self.act(x)


class Keeping(NormAct):
    """Keeps something."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps)
        return self.act(x)


class Property(NormAct):
    """An attribute that is computed."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, self.momentum, self.eps)
        return self.act(x)


def _half_eps(self: Any) -> float:
    return 0.5


Property.eps = property(_half_eps, lambda self, value: None)  # type: ignore[assignment]

LOOK_ALIKES = (Doubled, DoubledBehind, OfTheInput, AnotherEps, Swapped, ByTheBatch, Unless, Keeping, Property)
