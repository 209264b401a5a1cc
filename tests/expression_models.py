"""The table of models with an expression in a forward - swapped, or a trap - with what is found in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expression_changes import (
    frozen,
    with_added_module,
    with_backward_hook,
    with_bn_eval,
    with_hook,
    with_instance_forward,
    with_lora,
    with_other_eps_and_dim,
    with_other_numbers,
    with_own_hook,
    with_parametrized_scale,
    with_pre_hook,
    with_sync_batch_norm,
    with_tensor_eps,
    with_weight_norm,
    without_tracking,
)
from expression_checks import Trap
from expression_forwards import (
    CHANNELS,
    FEATURES,
    Scale,
    abs_in_place,
    alias_l1,
    another_tensor,
    appending,
    autocast_block,
    block,
    changed,
    counting,
    defaulted,
    detached,
    eps_behind_bn,
    eps_everywhere,
    eps_l1,
    gated,
    grad_query,
    in_place_l1,
    in_place_scale,
    isinstance_query,
    keyword_only,
    l1,
    linear_in_both,
    linear_twice,
    literal,
    mul_in_place,
    no_abs,
    no_grad_block,
    no_grad_linear,
    no_keepdim,
    no_scale,
    of_config,
    of_global,
    on_data,
    only_the_size,
    output_elsewhere,
    plain_l1,
    scale_behind,
    scale_first,
    scale_twice,
    shape_after_in_place,
    sum_not_mean,
    training_branch,
    training_flag,
    two_batch_norms,
    two_dims,
    variadic,
    while_loop,
    written,
)
from torch import Tensor, nn

L1, LSB = "l1_norm", "linear_scale_batch_norm"
WITHIN = {"": "region"}
CODE, PART, OTHER, CHILD = "NOT_STRAIGHT_LINE", "PART_OF_FORWARD", "UNSUPPORTED", "CHILD"


def l1_trap(forward: Callable[..., Any], plan: dict[str, str], *cases: str, **options: Any) -> Trap:
    return Trap(l1(forward), plan, cases, **options)


def refused(kind: str, reason: str) -> dict[str, str]:
    return {"": f"{kind} {reason}"}


def _nested(*children: nn.Module) -> nn.Module:
    return nn.Sequential(*children)


def _tied(module: Any) -> None:
    module.scale = module.bn.weight


def _shared() -> nn.Module:
    first = written(block, (), width=FEATURES)()
    model = nn.Sequential(first, nn.Tanh(), first)
    model.again = first
    del model.again
    return model


def _one_linear_in_two_blocks() -> nn.Module:
    first, second = written(block, width=FEATURES, scale=(1,))(), written(block, width=FEATURES, scale=())()
    second.gemm = first.gemm
    return nn.Sequential(first, second)


class InLists(nn.Module):
    """Blocks in a ModuleList and a ModuleDict, and an nn.Sequential whose children are called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([written(block, width=FEATURES, scale=(FEATURES,))()])
        self.named = nn.ModuleDict({"norm": l1(plain_l1)()})
        self.run = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = one(x)
        return self.named["norm"](self.run(x) + self.run[0](x))


class OwnForward(type(written(block)())):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Inherits(type(written(block)())):  # type: ignore[misc]
    """Says nothing of its own."""


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def _with_child(name: str, child: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return changed(lambda module: setattr(module, name, child()))


def _runs(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CHANNELS), *middle, nn.BatchNorm1d(CHANNELS), nn.ReLU())


SCALES: dict[str, Any] = {
    "parameter_0d": (),
    "parameter_1": (1,),
    "parameter_c": (CHANNELS,),
    "parameter_1c": (1, CHANNELS),
    "buffer_0d": torch.tensor(0.5),
    "buffer_1": torch.ones(1),
    "buffer_c": torch.ones(CHANNELS),
    "buffer_1c": torch.ones(1, CHANNELS),
    "number": 0.75,
    "whole_number": -3,
}

FORMS = {"before": block, "first": scale_first, "behind": scale_behind, "twice": scale_twice}

BATCH_NORMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "momentum_none": ({"momentum": None}, ("bn-momentum", "bn-batches-tracked", "bn-unbiased-variance")),
    "momentum_0": ({"momentum": 0.0}, ("bn-momentum", "bn-batches-tracked")),
    "momentum_03": ({"momentum": 0.3, "eps": 1e-2}, ("bn-momentum", "bn-batches-tracked", "bn-unbiased-variance")),
    "affine_false": ({"affine": False}, ("bn-affine-false",)),
    "untracked": ({"track_running_stats": False}, ("bn-no-running-stats",)),
}

TABLE: dict[str, Trap] = {
    **{
        f"scale_{form}_{name}": Trap(written(forward, scale), WITHIN, ("scale-forms",))
        for form, forward in FORMS.items()
        for name, scale in SCALES.items()
    },
    "scale_absent": Trap(written(no_scale), WITHIN, ("scale-forms",)),
    "scale_literal": Trap(written(literal), WITHIN, ("scale-forms", "scale-values")),
    "scale_negative": Trap(written(block, -2.5), WITHIN, ("scale-values",)),
    "scale_zero": Trap(written(block, 0.0), WITHIN, ("scale-values",)),
    "scale_behind_zero": Trap(written(scale_behind, 0), WITHIN, ("scale-values",)),
    **{f"bn_{name}": Trap(written(block, **options), WITHIN, cases) for name, (options, cases) in BATCH_NORMS.items()},
    "bn_tracking_switched_off": Trap(
        changed(lambda m: setattr(m.bn, "track_running_stats", False)), WITHIN, ("bn-no-running-stats",)
    ),
    "bn_tracking_switched_off_later": Trap(
        written(block), WITHIN, ("bn-no-running-stats", "attributes-changed-later"), later=without_tracking
    ),
    "bn_frozen": Trap(written(block), WITHIN, ("bn-frozen",), later=with_bn_eval),
    # sequential runs
    "sequential": Trap(lambda: _runs(), WITHIN, ("scale-forms", "containers")),
    "sequential_scale": Trap(lambda: _runs(Scale()), WITHIN, ("scale-forms", "containers")),
    "sequential_number": Trap(lambda: _runs(Scale(-0.5)), WITHIN, ("scale-forms", "containers")),
    # Its BatchNorm is joined with what stands behind it.
    "sequential_dropout": Trap(lambda: _runs(nn.Dropout(0.0)), WITHIN, ("containers",), modes=("train",)),
    "in_lists_and_dicts": Trap(InLists, {"blocks.0": "region", "named.norm": L1, "run": "region"}, ("containers",)),
    # Expressions
    "linear_twice": Trap(written(linear_twice), refused(LSB, OTHER), ("linear-called-twice",)),
    "linear_in_both": Trap(written(linear_in_both), refused(LSB, OTHER), ("linear-called-twice",)),
    "output_elsewhere": Trap(written(output_elsewhere), WITHIN, ("linear-output-used-elsewhere",)),
    "two_batch_norms": Trap(written(two_batch_norms), WITHIN, ("one-linear-two-batch-norms",)),
    "one_linear_in_two_blocks": Trap(
        _one_linear_in_two_blocks, {"0": "region", "1": "region"}, ("one-linear-two-batch-norms", "shared-module")
    ),
    "in_place_l1": l1_trap(in_place_l1, refused(L1, CODE), "in-place-and-aliases", backward_raises=True),
    "alias_l1": l1_trap(alias_l1, WITHIN, "in-place-and-aliases"),
    "abs_in_place": l1_trap(abs_in_place, {}, "in-place-and-aliases"),
    "in_place_scale": Trap(written(in_place_scale), refused(LSB, OTHER), ("in-place-and-aliases",)),
    "mul_in_place": Trap(written(mul_in_place), refused(LSB, OTHER), ("in-place-and-aliases",)),
    "no_abs": l1_trap(no_abs, {}, "l1-without-abs"),
    "two_dims": l1_trap(two_dims, refused(L1, OTHER), "other-dim"),
    "no_keepdim": l1_trap(no_keepdim, refused(L1, OTHER), "other-dim", shape=(6, 6)),
    **{f"l1_dim_{dim}": Trap(l1(eps_l1, dim), {"": L1}, ("other-dim",), shape=(3, 4, 5)) for dim in (0, 1, 2, -1, -3)},
    "another_tensor": l1_trap(another_tensor, refused(L1, PART), "other-tensor"),
    "sum_not_mean": l1_trap(sum_not_mean, {}, "sum-not-mean"),
    "l1_with_eps": l1_trap(eps_l1, {"": L1}, "added-eps"),
    "eps_everywhere": l1_trap(eps_everywhere, refused(L1, OTHER), "added-eps"),
    "eps_behind_linear": Trap(written(eps_behind_bn), refused(LSB, OTHER), ("added-eps",)),
    "linear_3d": Trap(
        written(block, (), width=4), WITHIN, ("linear-3d-input",), shape=(3, 4, FEATURES), modes=("eval",)
    ),
    "on_data": l1_trap(on_data, refused(L1, "NOT_STRAIGHT_LINE"), "data-dependent-control-flow"),
    "while_loop": l1_trap(while_loop, WITHIN, "data-dependent-control-flow"),
    "counting": Trap(written(counting), WITHIN, ("side-effects",), attributes=("calls",)),
    "appending": l1_trap(appending, WITHIN, "side-effects"),
    "training_branch": l1_trap(training_branch, refused(L1, OTHER), "training-branches"),
    "training_flag": Trap(written(training_flag), refused(LSB, OTHER), ("training-branches",)),
    "variadic": l1_trap(variadic, refused(L1, OTHER), "signatures"),
    "keyword_only": l1_trap(keyword_only, WITHIN, "signatures"),
    "defaulted": Trap(written(defaulted), WITHIN, ("signatures",)),
    # Module tree
    "own_forward": Trap(OwnForward, {}, ("subclass-own-forward",)),
    "inherited_forward": Trap(Inherits, WITHIN, ("subclass-own-forward",)),
    "own_linear": Trap(
        _with_child("gemm", lambda: OwnLinear(FEATURES, CHANNELS)), refused(LSB, CHILD), ("subclass-own-forward",)
    ),
    "instance_forward": Trap(changed(with_instance_forward), refused(LSB, CHILD), ("instance-forward",)),
    "parametrized_linear": Trap(changed(with_weight_norm), refused(LSB, CHILD), ("parametrized",)),
    "parametrized_scale": Trap(changed(with_parametrized_scale), refused(LSB, "PARAMETRIZED"), ("parametrized",)),
    "hooked_child": Trap(changed(with_hook), refused(LSB, CHILD), ("hooks",)),
    "hooked": Trap(changed(with_own_hook), WITHIN, ("hooks",)),
    "shared": Trap(_shared, {"0": "region"}, ("shared-module",)),
    "tied": Trap(changed(_tied), WITHIN, ("tied-parameters",)),
    "root": Trap(l1(plain_l1), {"": L1}, ("root-is-norm",)),
    "no_bias_no_affine": Trap(
        changed(lambda m: setattr(m, "gemm", nn.Linear(FEATURES, CHANNELS, bias=False)), affine=False),
        WITHIN,
        ("no-affine",),
    ),
    "frozen_scale": Trap(changed(lambda m: m.scale.requires_grad_(False)), WITHIN, ("frozen-parameters",)),
    "frozen_linear": Trap(changed(lambda m: m.gemm.requires_grad_(False)), WITHIN, ("frozen-parameters",)),
    "frozen_all": Trap(changed(frozen), WITHIN, ("frozen-parameters",)),
    "sync_batch_norm": Trap(
        _with_child("bn", lambda: nn.SyncBatchNorm(CHANNELS)), {}, ("sync-batch-norm",), modes=("eval",)
    ),
    # Traps that trace cleanly
    "no_grad_block": l1_trap(no_grad_block, refused(L1, CODE), "trap-no-grad-block"),
    "no_grad_linear": Trap(written(no_grad_linear), refused(LSB, CODE), ("trap-no-grad-block",)),
    "detached": l1_trap(detached, refused(L1, PART), "trap-no-grad-block"),
    "autocast_block": Trap(written(autocast_block), WITHIN, ("trap-autocast-block",)),
    "grad_query": l1_trap(grad_query, refused(L1, CODE), "trap-grad-query"),
    "of_global": l1_trap(of_global, WITHIN, "trap-config-and-globals"),
    "of_config": l1_trap(of_config, WITHIN, "trap-config-and-globals"),
    "isinstance": l1_trap(isinstance_query, WITHIN, "trap-isinstance"),
    "shape_after_in_place": l1_trap(shape_after_in_place, WITHIN, "trap-shape-after-in-place"),
    "only_the_size": l1_trap(only_the_size, refused(L1, OTHER), "trap-returns-rstd"),
    "gated": l1_trap(gated, WITHIN, "trap-returns-rstd"),
    # Changes after the swap
    "later_number": l1_trap(eps_l1, {"": L1}, "attributes-changed-later", later=with_other_eps_and_dim),
    "later_tensor_eps": l1_trap(eps_l1, {"": L1}, "attributes-changed-later", later=with_tensor_eps),
    "later_settings": Trap(written(block), WITHIN, ("attributes-changed-later",), later=with_other_numbers),
    "later_forward": Trap(written(block), WITHIN, ("attributes-changed-later",), later=with_instance_forward),
    "later_add_module": Trap(written(block), WITHIN, ("later-add-module",), later=with_added_module),
    "later_hook": Trap(written(block), WITHIN, ("later-hooks",), later=with_hook),
    "later_pre_hook": Trap(written(block), WITHIN, ("later-hooks",), later=with_pre_hook),
    "later_backward_hook": Trap(written(block), WITHIN, ("later-hooks",), later=with_backward_hook),
    "later_own_hook": Trap(written(block), WITHIN, ("later-hooks",), later=with_own_hook),
    "later_lora": Trap(written(block), WITHIN, ("later-lora",), later=with_lora),
    "later_weight_norm": Trap(written(block), WITHIN, ("later-weight-norm",), later=with_weight_norm),
    "later_parametrized_scale": Trap(written(block), WITHIN, ("later-weight-norm",), later=with_parametrized_scale),
    "later_sync_batch_norm": Trap(
        written(block), WITHIN, ("later-sync-batch-norm",), later=with_sync_batch_norm, modes=("eval",)
    ),
}
