"""What looks like an RMSNorm written by hand and is none, or none that can be trusted."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from rms_models import Norm
from torch import nn

from normswap.plans import Reason


class OfItsOwnWidth(Norm):
    width = 3

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.view(self.width)


class ByKeyword(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.view(dtype=torch.float32)


class AnotherInTraining(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones_like(self.weight))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.training:
            return y * self.other
        return y * self.weight


class UnweightedInTraining(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.training:
            return y
        return y * self.weight


class Config:
    eps = 1e-5


GLOBAL_EPS = 1e-5


class ReturnsRstd(Norm):
    def forward(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Gated(Norm):
    def forward(self, x, gate=None):
        x = x * F.silu(gate)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SelfGated(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y * F.silu(x)


class NoGrad(Norm):
    def forward(self, x):
        with torch.no_grad():
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * r * self.weight


class AutocastOff(Norm):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GradQuery(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * self.weight if torch.is_grad_enabled() else y


class GradNumber(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps + torch.is_grad_enabled()) * self.weight


class ReadsConfig(Norm):
    config = Config()

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps) * self.weight


class ReadsGlobal(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + GLOBAL_EPS) * self.weight


class AsksForType(Norm):
    def forward(self, x):
        if isinstance(x, nn.Parameter):
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ShapeAfterInPlace(Norm):
    def forward(self, x):
        x.unsqueeze_(0)
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.eps) * self.weight


class InPlace(Norm):
    def forward(self, x):
        x *= torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight


class Sum(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class EpsOutside(Norm):
    def forward(self, x):
        return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps) * self.weight


class NoKeepdim(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1) + self.eps) * self.weight


class TwoDims(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.eps) * self.weight


class OtherDim(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight


class Partial(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x[..., :3].pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OtherTensor(Norm):
    def forward(self, x):
        return self.weight * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class TwiceTheEps(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps) * self.weight


class WeightTwice(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight)


class Biased(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + 1


class Cubed(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) ** 3 * self.weight


class Widened(Norm):
    def forward(self, x):
        return x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DataDependent(Norm):
    def forward(self, x):
        if x.max() > 0:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SideEffect(Norm):
    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        self.seen = variance
        return x * torch.rsqrt(variance + self.eps) * self.weight


class Starred(Norm):
    def forward(self, *args):
        return args[0] * torch.rsqrt(args[0].pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class KeywordOnly(Norm):
    def forward(self, x, *, scale=1.0):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * scale


class Defaulted(Norm):
    def forward(self, x=None):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DifferentInTraining(Norm):
    def forward(self, x):
        if self.training:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Recursive(Norm):
    def forward(self, x):
        return self.forward(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ToADevice(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.to("cpu")


class Property(Norm):
    @property
    def epsilon(self):
        return self.eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Scalar(Norm):
    shape = (1,)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Child(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight)


class Closed(Norm):
    def forward(self, x):
        return super().__getattr__("weight") * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Decorated(Norm):
    @torch.no_grad()
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class CallsACall(Norm):
    def forward(self, x):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return functools.partial(torch.mul)(x, root) * self.weight


LOOK_ALIKES = [
    *((ReturnsRstd, Reason.UNSUPPORTED, "another function"), (Gated, Reason.UNSUPPORTED, "gate")),
    *((SelfGated, Reason.PART_OF_FORWARD, "silu"), (NoGrad, Reason.NOT_STRAIGHT_LINE, "with block")),
    *((AutocastOff, Reason.NOT_STRAIGHT_LINE, "with block"), (GradQuery, Reason.NOT_STRAIGHT_LINE, "grad")),
    *((GradNumber, Reason.PART_OF_FORWARD, "is_grad_enabled"), (ReadsConfig, Reason.UNSUPPORTED, "self.config")),
    *((ReadsGlobal, Reason.NOT_STRAIGHT_LINE, "GLOBAL_EPS"), (AsksForType, Reason.NOT_STRAIGHT_LINE, "isinstance")),
    *((ShapeAfterInPlace, Reason.NOT_STRAIGHT_LINE, "not used"), (InPlace, Reason.NOT_STRAIGHT_LINE, "in-place")),
    *((Sum, Reason.PART_OF_FORWARD, "sum"), (EpsOutside, Reason.UNSUPPORTED, "another function")),
    *((NoKeepdim, Reason.UNSUPPORTED, "keepdim=False"), (TwoDims, Reason.UNSUPPORTED, "dim=(-2, -1)")),
    *((OtherDim, Reason.UNSUPPORTED, "not one value per index"), (Partial, Reason.NOT_STRAIGHT_LINE, "part of")),
    *((OtherTensor, Reason.UNSUPPORTED, "another function"), (TwiceTheEps, Reason.UNSUPPORTED, "another function")),
    *((WeightTwice, Reason.UNSUPPORTED, "another function"), (Biased, Reason.UNSUPPORTED, "another function")),
    *((Cubed, Reason.UNSUPPORTED, "another function"), (Widened, Reason.PART_OF_FORWARD, "double")),
    *((DataDependent, Reason.NOT_STRAIGHT_LINE, "x.max()"), (SideEffect, Reason.NOT_STRAIGHT_LINE, "self.seen")),
    *((Starred, Reason.UNSUPPORTED, "args"), (KeywordOnly, Reason.UNSUPPORTED, "scale")),
    *((Defaulted, Reason.UNSUPPORTED, "None"), (DifferentInTraining, Reason.UNSUPPORTED, "another function")),
    *((Recursive, Reason.NOT_STRAIGHT_LINE, "itself"), (ToADevice, Reason.UNSUPPORTED, "another function")),
    *((Property, Reason.UNSUPPORTED, "self.epsilon"), (Scalar, Reason.UNSUPPORTED, "not one value per index")),
    *((Child, Reason.PART_OF_FORWARD, "self.act"), (Closed, Reason.NOT_STRAIGHT_LINE, "closes over")),
    *((OfItsOwnWidth, Reason.UNSUPPORTED, "one value per"), (ByKeyword, Reason.UNSUPPORTED, "one value per")),
    (AnotherInTraining, Reason.UNSUPPORTED, "self.other, self.weight in another way"),
    (UnweightedInTraining, Reason.UNSUPPORTED, "reads self.weight in another way"),
    *((Decorated, Reason.NOT_STRAIGHT_LINE, "decorator"), (CallsACall, Reason.NOT_STRAIGHT_LINE, "functools")),
]


class HandLayerNorm(Norm):
    def forward(self, x):
        u = x - x.mean(-1, keepdim=True)
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class FrozenBatchNorm(Norm):
    def forward(self, x):
        return x * (self.weight + self.eps).rsqrt()


class Sized(Norm):
    def size(self, x):
        return x.abs()

    def forward(self, x):
        return x * torch.rsqrt(self.size(x).mean(-1, keepdim=True) + self.eps)


class RootOfSize(Sized):
    def forward(self, x):
        return x.pow(2).mean(-1, keepdim=True) + torch.sqrt(self.size(x))


class Loss(nn.Module):
    def forward(self, x, y):
        return torch.sqrt(((x - y) ** 2).mean())
