"""Wrong uses, and the word of the cure that each must be told."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tool_table import model_on
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

import normswap
from normswap import modules
from normswap.plans import Plan

X = torch.linspace(-2, 3, 32).reshape(4, 8)
ORIGINAL = "raised while running the ORIGINAL model, on these inputs; nothing was changed"


def model() -> nn.Module:
    return model_on("cpu", 1)


def fast() -> nn.Module:
    return normswap.optimize(model(), X)


def plan() -> Plan:
    return normswap.report(fast()).plan


class Own(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def instance_forward() -> nn.Module:
    made = nn.Sequential(nn.LayerNorm(8))
    made[0].forward = lambda x: x  # type: ignore[method-assign]
    return made


def parametrized() -> nn.Module:
    made = nn.Sequential(nn.LayerNorm(8))
    parametrize.register_parametrization(made[0], "weight", nn.Tanh())
    return made


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())


def scripted() -> Any:
    return torch.jit.script(model())


def saved(folder: Path) -> Path:
    torch.save(model().state_dict(), folder / "net.pt")
    return folder / "net.pt"


def optimize(*args: Any, **kwargs: Any) -> Callable[[Path], Any]:
    return lambda folder: normswap.optimize(*(one() if callable(one) else one for one in args), **kwargs)


MISUSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    # what is no model
    "a path": (optimize("net.pt"), "must be a torch.nn.Module, got str"),
    "nothing": (optimize(None), "must be a torch.nn.Module, got NoneType"),
    "a class": (lambda folder: normswap.optimize(nn.LayerNorm), r"make one: LayerNorm\("),  # type: ignore[arg-type]
    "a state_dict": (lambda folder: normswap.optimize(model().state_dict()), "load_state_dict it into a model"),
    "a function": (lambda folder: normswap.optimize(model), "optimize the modules it calls"),
    "an exported program": (
        lambda folder: normswap.optimize(torch.export.export(model(), (X,))),
        "optimize the model before exporting",
    ),
    "report of a tensor": (lambda folder: normswap.report(X), "must be a torch.nn.Module, got Tensor"),
    "validate of a tensor": (lambda folder: normswap.validate(X, X), "must be a torch.nn.Module, got Tensor"),
    "revert of a name": (lambda folder: normswap.revert("0"), "must be a torch.nn.Module, got str"),
    "disabled of nothing": (lambda folder: normswap.disabled(None), "must be a torch.nn.Module, got NoneType"),
    "plan of a name": (lambda folder: normswap.plan("0"), "must be a torch.nn.Module, got str"),
    "fold of a name": (lambda folder: normswap.fold("0"), "must be a torch.nn.Module, got str"),
    "save of a name": (lambda folder: normswap.save("0", folder / "out"), "must be a torch.nn.Module, got str"),
    # inputs
    "a numpy array": (optimize(model, X.numpy()), "torch.from_numpy"),
    "a loader": (optimize(model, DataLoader([X])), r"next\(iter\("),
    "an iterator": (optimize(model, iter([X])), r"next\(iter\("),
    "a shape": (optimize(model, X.shape), r"torch.randn\(4, 8\)"),
    "a shape as a tuple": (optimize(model, (4, 8)), ORIGINAL),
    "text": (optimize(model, "float32[4,8]"), "must be a tensor or a tuple"),
    "kwargs that are a tensor": (optimize(model, X, X), "example_kwargs must be a dict"),
    "an unknown argument": (optimize(model, X, {"mask": X}), f"'mask'.*{ORIGINAL}"),
    "no argument": (optimize(model, ()), f"missing 1 required.*{ORIGINAL}"),
    "another width": (optimize(model, torch.randn(4, 9)), f"size.4, 9.*{ORIGINAL}"),
    "integers": (optimize(model, X.long()), f"dtype.*{ORIGINAL}"),
    "another dtype": (optimize(model, X.half()), f"same dtype.*{ORIGINAL}"),
    "another device": (optimize(model, X.to("meta")), f"device.*{ORIGINAL}"),
    "validate with a dict": (lambda folder: normswap.validate(fast(), {"x": X}), "example_kwargs"),
    "validate at another width": (lambda folder: normswap.validate(fast(), torch.randn(4, 9)), ORIGINAL),
    # options
    "validate=True": (optimize(model, X, validate=True), "'auto', 'forward', 'grad', 'off'"),
    "on_mismatch": (optimize(model, X, on_mismatch="ignore"), "'rollback', 'raise', 'warn'"),
    "on_empty": (optimize(model, X, on_empty="error"), "'warn', 'raise', 'ignore'"),
    "min_speedup=0": (optimize(model, X, min_speedup=0), "None to time nothing"),
    "min_speedup=True": (optimize(model, X, min_speedup=True), "None to time nothing"),
    "min_speedup=nan": (optimize(model, X, min_speedup=float("nan")), "None to time nothing"),
    "inplace='no'": (optimize(model, X, inplace="no"), "inplace must be one of True, False"),
    "for_compile='yes'": (optimize(model, X, for_compile="yes"), "for_compile must be one of True, False, None"),
    "in_place": (optimize(model, X, in_place=True), "unexpected keyword argument 'in_place'"),
    "mode of validate": (lambda folder: normswap.validate(fast(), X, mode="backward"), "'forward', 'grad', 'off'"),
    "include a number": (optimize(model, X, include=3), r"glob, 're:...', fn\(module, name\)"),
    "include a class": (optimize(model, X, include=nn.LayerNorm), r"fn\(module, name\) -> bool"),
    "include a module": (optimize(model, X, include=[nn.ReLU()]), r"fn\(module, name\) -> bool"),
    "include no expression": (optimize(model, X, include="re:("), "not a regular expression"),
    "include another name": (optimize(model, X, include="encoder.*"), "matches no module"),
    "exclude a kind": (optimize(model, X, exclude="layer_norm"), "matches no module"),
    # models in which nothing can be swapped
    "no norm": (lambda folder: normswap.optimize(nn.Linear(8, 8), X, on_empty="raise"), "holds no norm"),
    "a scripted model": (lambda folder: normswap.optimize(scripted(), X), "optimize the eager model before"),
    "a traced model": (lambda folder: normswap.optimize(torch.jit.trace(model(), X), X), "the eager model before"),
    "a frozen script": (lambda folder: normswap.optimize(torch.jit.freeze(scripted()), X), "optimize it before that"),
    "an exported module": (
        lambda folder: normswap.optimize(torch.export.export(model(), (X,)).module(), X),
        "traced or exported.*optimize it before that",
    ),
    "a norm of one's own": (lambda folder: normswap.optimize(nn.Sequential(Own(8)), X), "use the torch.nn class"),
    "a forward set by hand": (optimize(instance_forward, X, inplace=True), "delete the instance's forward"),
    "a parametrized norm": (optimize(parametrized, X, inplace=True), "remove the parametrization, or apply it after"),
    "a lazy model": (optimize(lazy, X), "dummy batch"),
    # plans
    "a plan as text": (lambda folder: normswap.apply(model(), plan().to_json()), r"Plan.from_json reads one"),
    "a report as a plan": (lambda folder: normswap.apply(model(), normswap.report(fast())), "pass report.plan"),
    "a plan of another structure": (
        lambda folder: normswap.apply(nn.Sequential(), plan()),
        "no module 0; plan it anew",
    ),
    "a plan of another type": (
        lambda folder: normswap.apply(nn.Sequential(nn.Linear(8, 8)), plan()),
        "0 must be a tool_table.Block, got torch.nn.modules.linear.Linear; plan it anew",
    ),
    "a plan twice": (lambda folder: normswap.apply(fast(), plan()), "got a swapped"),
    "no JSON": (lambda folder: Plan.from_json("swap all"), r"plan.to_json\(\) writes one"),
    "another JSON": (lambda folder: Plan.from_json("[]"), r"plan.to_json\(\) writes one"),
    "a report's JSON": (lambda folder: Plan.from_json(normswap.report(fast()).to_json()), r"plan.to_json\(\) writes"),
    "a plan of another version": (lambda folder: Plan.from_json('{"format": 9}'), "write it anew with this version"),
    "a plan without its regions' neighbours": (
        lambda folder: Plan.from_json('{"format": 1, "swaps": [], "refused": []}'),
        "format 1 is not 5; write it anew with this version",
    ),
    # modules and weights
    "from_torch of a subclass": (lambda folder: modules.LayerNorm.from_torch(Own(8)), "a subclass may compute"),
    "from_torch of another": (lambda folder: modules.RMSNorm.from_torch(nn.LayerNorm(8)), "exactly a torch.nn.RMSNorm"),
    "an L1 norm with state": (lambda folder: modules.L1Norm.from_torch(nn.Linear(2, 2)), "must have no state"),
    "a scale of no shape": (lambda folder: modules.LinearScaleBatchNorm(4, 8, (3,)), r"\(\), \(1,\), \(8,\) or"),
    "weights of another model": (lambda folder: normswap.copy_weights(model(), nn.Linear(8, 8)), "the same keys"),
    "weights as a state_dict": (
        lambda folder: normswap.copy_weights(model().state_dict(), model()),
        "load_state_dict takes a state_dict",
    ),
    "nothing to fold": (lambda folder: normswap.fold(model()), "no module of this model is a Linear -> scale"),
    # files
    "no file": (lambda folder: normswap.load_model(folder / "none"), "no such file"),
    "a file that was not converted": (lambda folder: normswap.load_model(saved(folder)), "normswap convert writes it"),
    "tensors without a model": (lambda folder: normswap.convert(saved(folder), folder / "out"), "pass a factory"),
}

# As wrong, and told elsewhere.
COVERED = {
    "a dict, a list, a number as example_inputs": "test_hints.py::test_inputs_of_another_kind",
    "hooks of accelerate": "test_hints.py::test_hooks_of_accelerate_have_their_own_cure",
    "a registered class without eps": "test_hints.py::test_a_registered_class_without_eps",
    "register_norm of no kind, no class, no such value": "test_registered.py::test_bad_arguments",
    "a model of meta tensors": "test_hints.py::test_a_model_without_values_is_told_why_it_was_not_run",
    "an optimizer made before": "test_hints.py::test_an_optimizer_of_this_model_is_warned_of",
    "a pruned model, copied": "test_scripted.py::test_what_cannot_be_copied_says_how_else",
    "a sharded model, copied": "test_sharded.py::test_a_copy_of_a_sharded_model_is_refused_with_the_cure",
    "fully_shard before": "test_sharded.py::test_what_is_sharded_already_is_refused_and_left_whole",
    "a Trainer made before its callback": "test_integrations.py::test_a_callback_added_too_late_says_so",
    "from_pretrained without a plan": "test_integrations.py::test_from_pretrained_without_a_plan",
    "a pipeline that is offloaded": "test_integrations.py::test_an_offloaded_pipeline_is_refused_with_the_cure",
}


def told(call: Callable[[], Any]) -> str:
    """All that is said: the error and its notes, or the warnings and the report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:
            return "\n".join([str(error), *getattr(error, "__notes__", ())])
    report = str(normswap.report(result)) if isinstance(result, nn.Module) else ""
    return "\n".join([*(str(one.message) for one in caught), report])


@pytest.mark.parametrize("name", MISUSES)
def test_a_wrong_use_is_told_its_cure(name: str, tmp_path: Path) -> None:
    call, cure = MISUSES[name]
    if sys.version_info < (3, 11):  # whose exceptions have no notes
        cure = re.sub(rf"(\.\*)?{ORIGINAL}", "", cure)
    text = told(lambda: call(tmp_path))
    assert text and re.search(cure, text, re.DOTALL), text


def test_all_of_them_are_there() -> None:
    folder = Path(__file__).parent
    for place in COVERED.values():
        file, name = place.split("::")
        assert f"def {name}(" in (folder / file).read_text(), place
    assert len(MISUSES) + len(COVERED) >= 72


def test_nothing_is_changed_by_a_model_that_raises() -> None:
    made = model()
    kept = [type(module) for module in made.modules()]
    with pytest.raises(RuntimeError):
        normswap.optimize(made, torch.randn(4, 9), inplace=True)
    assert [type(module) for module in made.modules()] == kept
