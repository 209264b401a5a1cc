"""Norms written out inside a larger forward: a row a kind of spellings that are found, and one of look-alikes."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from region_checks import Case

SPELLINGS: dict[str, tuple[str, ...]] = {
    "l1_norm": (
        "h / h.abs().mean(-1, keepdim=True)",
        "h / torch.mean(torch.abs(h), dim=1, keepdim=True)",
        "torch.div(h, abs(h).mean((-1,), True))",
        "m = h.abs().mean(dim=1, keepdim=True); z = h * 3; h.true_divide(m) + z",
        "h / (1e-3 + torch.absolute(input=h).mean(-1, keepdim=True))",
        "h / h.abs().mean(-1, keepdim=True).clamp(min=self.slope)",
        "m = h.abs().mean(self.dim, keepdim=True); h / torch.clamp_min(m, 0.3)",
        "eps = 0.25; h / (h.abs().mean(-1, keepdim=True) + eps)",
    ),
    "l2_norm": (
        "h / h.norm(p=2, dim=-1, keepdim=True)",
        "h / torch.norm(h, dim=1, keepdim=True)",
        "n = h.norm(2, -1, True); h.div(n)",
        "h / torch.linalg.norm(h, dim=-1, keepdim=True)",
        "h / torch.linalg.vector_norm(h, 2, dim=-1, keepdim=True)",
        "h / h.norm(dim=self.dim, keepdim=True).clamp(min=1e-3)",
        "h / torch.clamp_min(h.norm(p='fro', dim=-1, keepdim=True), self.slope)",
        "F.normalize(h)",
        "F.normalize(self.lin(h), p=2.0, dim=-1, eps=0.5)",
    ),
    "frobenius_norm": (
        "h / h.norm()",
        "n = torch.norm(h); h / n",
        "h.divide(torch.norm(input=h, p=2))",
        "h / torch.linalg.norm(h)",
        "h / torch.linalg.vector_norm(h)",
        "h / h.norm(p='fro', dim=None)",
    ),
    "layer_norm_by_hand": (
        "h = h.float(); (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)",
        "h = h.float(); u = h.mean(1, keepdim=True); s = (h - u).pow(2).mean(1, keepdim=True); "
        "h = (h - u) / torch.sqrt(s + 1e-6); h",
        "f = h.float(); u = torch.mean(f, dim=-1, keepdim=True); c = f - u; v = (c * c).mean(-1, True); "
        "n = c * torch.rsqrt(v + self.slope); (n * self.weight + self.bias).type_as(h)",
        "dtype = h.dtype; f = h.to(torch.float32); c = f - f.mean(-1, keepdim=True); "
        "v = torch.var(f, dim=-1, correction=0, keepdim=True); "
        "c = c * (v + 1e-5) ** -0.5; c = self.bias.float() + self.weight.float() * c; c.to(dtype)",
        "f = h.float(); c = f - f.mean(-1, keepdim=True); "
        "(self.weight * (c / torch.sqrt(torch.square(c).mean(-1, keepdim=True) + 1e-5))).type_as(h)",
        "h = h.float(); c = h - h.mean(self.dim, keepdim=True); "
        "c / (1e-5 + h.var(self.dim, unbiased=False, keepdim=True)).sqrt()",
    ),
    "rms_norm_by_hand": (
        "h = h.float(); h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "h = h.float(); h / torch.sqrt(torch.mean(h ** 2, dim=1, keepdim=True) + self.slope)",
        "dtype = h.dtype; f = h.to(torch.float32); v = f.pow(2).mean(-1, keepdim=True); "
        "f = f * torch.rsqrt(v + 1e-6); self.weight * f.to(dtype)",
        "f = h.float(); f = f * (f.square().mean(-1, keepdim=True) + 1e-6) ** -0.5; "
        "f = f * (1.0 + self.weight.float()); f.type_as(h)",
        "f = h.float(); (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6)).type_as(h) * self.weight",
        "f = h.float(); r = 1 / torch.sqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6); (r * f).to(h.dtype)",
    ),
    "weight_standardization": (
        "F.batch_norm(h.reshape(1, 6, -1), None, None, training=True, momentum=0.0, eps=self.slope).reshape_as(h)",
        "n = F.batch_norm(h.view(1, 8, -1), None, None, self.weight, self.bias, True, 0.1, 1e-3); n.view(h.shape)",
        "F.batch_norm(input=h[:1], running_mean=None, running_var=None, training=True, momentum=0.3)",
        "gain = self.weight * 0.5; "
        "F.batch_norm(h.reshape(1, 8, 2, -1), None, None, weight=gain.view(-1), training=True).reshape(h.shape)",
    ),
}
"""By kind: statements on ``h``, of which the last is the result. All are found."""

LOOK_ALIKES: dict[str, tuple[str, ...]] = {
    "l1_norm": (
        "h / h.abs().mean(-1)[..., None]",
        "h / h.abs().mean((0, 1), keepdim=True)",
        "h / h.abs().mean()",
        "h / y.abs().mean(-1, keepdim=True)",
        "h / h.mean(-1, keepdim=True)",
        "m = h.abs().mean(-1, keepdim=True); h / m + m",
        "m = h.abs().mean(-1, keepdim=True); h.mul_(2); h / m",
        "m = h.abs().mean(-1, keepdim=True); h = h + 1; h / m",
        "h / torch.add(h.abs().mean(-1, keepdim=True), 1e-3, alpha=2)",
        "h / h.abs().mean(-1, keepdim=True).clamp(1e-3, 10.0)",
        "torch.div(h, h.abs().mean(-1, keepdim=True), rounding_mode='floor')",
        "h / h.abs().mean(-1, keepdim=True, dtype=torch.float64)",
        "h /= h.abs().mean(-1, keepdim=True); h",
        "h.abs() / h.abs().mean(-1, keepdim=True)",
        "m = [h.abs().mean(-1, keepdim=True)]; h / m[0]",
    ),
    "l2_norm": (
        "h / h.norm(p=1, dim=-1, keepdim=True)",
        "h / (h.norm(dim=-1, keepdim=True) + 1e-3)",
        "h / h.norm(dim=-1)[..., None]",
        "h / h.norm(dim=(0, 1), keepdim=True)",
        "h / y.norm(dim=-1, keepdim=True)",
        "F.normalize(h, p=3.0)",
        "F.normalize(h, p=self.dim)",
        "h / h.norm(dim=-1, keepdim=True, dtype=torch.float64)",
        "h / torch.linalg.norm(h[0], 2, (0, 1), True)",
        "h / h.norm(dim=-1, keepdim=True).clamp(max=1.0)",
        "n = h.norm(dim=-1, keepdim=True); h / n * n",
        "n = h.norm(dim=-1, keepdim=True); h[0] = 1; h / n",
    ),
    "frobenius_norm": (
        "h / h.norm(p=1)",
        "h[0] / torch.linalg.norm(h[0], 2)",
        "h / torch.linalg.norm(h[0], 'fro')",
        "h / (h.norm() + 1e-6)",
        "h / h.norm(float('inf'))",
        "h * h.norm()",
        "n = h.norm(); h.zero_(); h / n",
    ),
    "layer_norm_by_hand": (
        "(h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True) + 1e-5)",
        "(h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, True, keepdim=True) + 1e-5)",
        "(h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True, unbiased=False) + 1e-5)",
        "(h - h.mean(-1, keepdim=True)) / (torch.sqrt(h.var(-1, keepdim=True, unbiased=False)) + 1e-5)",
        "(h - h.mean(1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)",
        "(h.mean(-1, keepdim=True) - h) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)",
        "(h - y.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)",
        "u = h.mean(-1, keepdim=True); (h - u) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5) + u",
        "c = h - h.mean(-1, keepdim=True); c / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5) + c",
        "c = h - h.mean(-1, keepdim=True); c / torch.sqrt((c ** 3).mean(-1, keepdim=True) + 1e-5)",
        "c = h - h.mean(-1, keepdim=True); c += y; c / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5)",
    ),
    "rms_norm_by_hand": (
        "h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + 1e-6)",
        "h * torch.rsqrt(h.pow(3).mean(-1, keepdim=True) + 1e-6)",
        "h * (torch.rsqrt(h.pow(2).mean(-1, keepdim=True)) + 1e-6)",
        "h * torch.sqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "h / torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "torch.sqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) / h",
        "h * torch.rsqrt((h * y).mean(-1, keepdim=True) + 1e-6)",
        "v = h.pow(2).mean(-1, keepdim=True); self.se = v; h * torch.rsqrt(v + 1e-6)",
        "v = h.pow(2).mean(-1, keepdim=True); h * torch.rsqrt(v + 1e-6) + v",
        "v = h.pow(2).mean(-1, keepdim=True); torch.relu_(h); h * torch.rsqrt(v + 1e-6)",
    ),
    "weight_standardization": (
        "F.batch_norm(h.view(1, 8, 6), self.bn.running_mean, self.bn.running_var, training=True) * 2",
        "F.batch_norm(h.view(1, 8, 6), self.bn.running_mean, self.bn.running_var) * 2",
        "F.batch_norm(h.view(1, 8, 6), None, None) * 2",
        "F.batch_norm(h.view(1, 8, 6), None, None, training=self.flag) * 2",
        "F.batch_norm(h.view(1, 8, 6), None, None, training=not self.flag) * 2",
    ),
}
"""By kind: what it resembles and is not. Nothing is found."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "l1_norm": ("h / h.abs().mean(self.flag, keepdim=True)",),
    "l2_norm": ("F.normalize(h, eps=-1.0)",),
    "layer_norm_by_hand": (
        "c = h - h.mean(-1, keepdim=True); c / torch.sqrt((c ** 2).mean(-1, keepdim=True) + self.weight)",
        "c = h - h.mean(1, keepdim=True); c / torch.sqrt((c ** 2).mean(1, keepdim=True) + 1e-5) * self.weight",
    ),
    "rms_norm_by_hand": (
        "h = h.double(); h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "f = h.half().float(); f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "f = h.to(torch.float16); f * torch.rsqrt(f.float().pow(2).mean(-1, keepdim=True) + 1e-6)",
    ),
    "weight_standardization": (
        "F.batch_norm(h, None, None, training=True)",
        "F.batch_norm(h.view(1, 8, 6), None, None, training=True, momentum=None)",
        "F.batch_norm(h.reshape(1, -1), None, None, training=True)",
        "F.batch_norm(h.reshape(1, 48, 1), None, None, training=True)",
        "F.batch_norm(h.view(1, 8, 6), None, None, self.weight[:6], training=True)",
    ),
}
"""By kind: found, and left to the expression itself when it runs."""


def _forwards(rows: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """A forward for each spelling, by kind and place, from a file: what is found is found in a source."""
    lines = ["import torch", "import torch.nn.functional as F", ""]
    for kind, spellings in rows.items():
        for index, text in enumerate(spellings):
            *statements, last = text.split("; ")
            body = ["h = x * 2", *statements, f"return torch.tanh({last}), h * y"]
            lines += [f"def {kind}_{index}(self, x, y):", *(f"    {line}" for line in body), ""]
    path = Path(tempfile.mkdtemp()) / "written_out.py"
    path.write_text("\n".join(lines))
    spec: Any = importlib.util.spec_from_file_location("written_out", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        f"{kind} {text}": getattr(module, f"{kind}_{i}") for kind, row in rows.items() for i, text in enumerate(row)
    }


def _cases(rows: Mapping[str, tuple[str, ...]], found: bool) -> dict[str, Case]:
    forwards = _forwards(rows).items()
    return {name: Case(f, (name.partition(" ")[0],) if found else (), exact=not found) for name, f in forwards}


FOUND: dict[str, Case] = _cases(SPELLINGS, True)
ALIKE: dict[str, Case] = {**_cases(LOOK_ALIKES, False), **_cases(ELSEWHERE, True)}
