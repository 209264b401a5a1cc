"""Whatever a forward does with its modules: folded it computes the same, or what differs stays, with a warning."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import pytest
import torch.nn.functional as F
from convolution_models import drawn
from torch import nn
from uses_models import (
    adding,
    assert_part_stays,
    functions_in,
    of_rows,
    of_the_net,
)


class Uses:
    """Forwards, each of which takes something apart; what each adds to the whole."""

    def by_a_property(self: Any, x: Any) -> Any:
        return self.head(x)

    def weights_by_a_property(self: Any, x: Any) -> Any:
        return self.bn(self.conv(x)) + self.kernel.sum()

    def by_a_function(self: Any, x: Any) -> Any:
        return of_the_net(self, x)

    def rows_by_a_function(self: Any, x: Any) -> Any:
        return of_rows(self.rows, x)

    def rows_by_a_method(self: Any, x: Any) -> Any:
        return self.each(self.rows, x)

    def by_a_static_method(self: Any, x: Any) -> Any:
        return self.stat(self.row, x)

    def unpacked(self: Any, x: Any) -> Any:
        first, _, _ = self.row
        return first(x)

    def unpacked_in_a_loop(self: Any, x: Any) -> Any:
        out = 0
        for first, _ in self.rows:
            out = out + first(x)
        return out

    def annotated(self: Any, x: Any) -> Any:
        first: nn.Module = self.row[0]
        return first(x)

    def mapped(self: Any, x: Any) -> Any:
        return list(map(lambda one: one(x), self.row))[0]  # noqa: C417, RUF015

    def starred(self: Any, x: Any) -> Any:
        out = 0
        for one in [*self.row, *self.rows[0]]:
            x = one(x)
            out = out + x
        return out

    def added_lists(self: Any, x: Any) -> Any:
        out = 0
        for one in list(self.row) + list(self.rows[0]):
            x = one(x)
            out = out + x
        return out

    def chained(self: Any, x: Any) -> Any:
        out = 0
        for one in itertools.chain(*self.rows):
            x = one(x)
            out = out + x
        return out

    def in_a_dict(self: Any, x: Any) -> Any:
        kept = {"a": self.row}
        return kept["a"][0](x)

    def put_in_a_dict(self: Any, x: Any) -> Any:
        kept = {}
        kept["r"] = self.row
        return kept["r"][0](x)

    def in_a_dict_comprehension(self: Any, x: Any) -> Any:
        kept = {place: one for place, one in enumerate(self.row)}  # noqa: C416
        return kept[0](x)

    def popped(self: Any, x: Any) -> Any:
        layers = list(self.row)
        return layers.pop(0)(x)

    def appended(self: Any, x: Any) -> Any:
        layers = []
        layers.append(self.row)
        return layers[0][0](x)

    def of_a_plain_list(self: Any, x: Any) -> Any:
        return self.stages[0][0](x)

    def of_a_plain_dict(self: Any, x: Any) -> Any:
        return self.table["row"][0](x)

    def dispatched(self: Any, x: Any) -> Any:
        return self.dispatch["a"](x)

    def by_a_computed_method(self: Any, x: Any, mode: str = "a") -> Any:
        return getattr(self, f"run_{mode}")(x)

    def by_getattr_itself(self: Any, x: Any) -> Any:
        return self.row.__getattr__("0")(x)

    def by_modules(self: Any, x: Any) -> Any:
        return self.row._modules.get("0")(x)

    def by_an_attrgetter(self: Any, x: Any) -> Any:
        return operator.attrgetter("row.0")(self)(x)

    def by_a_method_of_a_child(self: Any, x: Any) -> Any:
        return self.block.pre(x)

    def by_a_property_of_a_child(self: Any, x: Any) -> Any:
        return self.block.first(x)

    def by_a_partial(self: Any, x: Any) -> Any:
        return functools.partial(of_the_net, self)(x)

    def by_getitem(self: Any, x: Any) -> Any:
        return self.row.__getitem__(0)(x)

    def by_a_default(self: Any, x: Any) -> Any:
        def run(x: Any, one: Any = self.row[0]) -> Any:
            return one(x)

        return run(x)

    def by_a_function_inside(self: Any, x: Any) -> Any:
        def run(one: Any) -> Any:
            return one[0](x)

        return run(self.row)

    def returned_inside(self: Any, x: Any) -> Any:
        def rows() -> Any:
            return self.row

        return rows()[0](x)

    def yielded(self: Any, x: Any) -> Any:
        def layers() -> Any:
            yield from self.row

        out = 0
        for one in layers():
            x = one(x)
            out = out + x
        return out

    def matched(self: Any, x: Any) -> Any:
        match self.row:
            case one:
                return one[0](x)

    def walrus(self: Any, x: Any) -> Any:
        return (first := self.row[0])(x) + 0 * len(type(first).__name__)

    def of_tuples(self: Any, x: Any) -> Any:
        one, _ = self.row, 0
        return one[0](x)

    def of_a_list_of_rows(self: Any, x: Any) -> Any:
        return [self.row, self.rows[0]][0][0](x)

    def zipped(self: Any, x: Any) -> Any:
        out = 0
        for one, factor in zip(self.row, (1, 2, 3), strict=True):
            x = one(x)
            out = out + x * factor
        return out

    def zipped_open(self: Any, x: Any) -> Any:
        firsts, _ = zip(*self.rows, strict=True)
        return firsts[0](x)

    def by_a_state_dict(self: Any, x: Any) -> Any:
        return self.row.state_dict()["0.weight"].sum()

    def by_parameters(self: Any, x: Any) -> Any:
        return sum(p.sum() for p in self.row.parameters())

    def by_parameters_of_self(self: Any, x: Any) -> Any:
        return sum(p.pow(2).sum() for name, p in self.named_parameters() if "row.0" in name)

    def by_a_condition(self: Any, x: Any) -> Any:
        return (self.row if x.ndim == 4 else self.rows[0])[0](x)

    def by_its_weight(self: Any, x: Any) -> Any:
        return F.conv2d(x, self.row[0].weight).mean()

    def by_a_lambda(self: Any, x: Any) -> Any:
        return (lambda one: one(x))(self.row[0])

    def by_a_partial_that_is_kept(self: Any, x: Any) -> Any:
        return self.partly(x)

    def added_in_place(self: Any, x: Any) -> Any:
        layers: list[Any] = []
        layers += self.row
        return layers[0](x)

    def by_names_in_a_loop(self: Any, x: Any) -> Any:
        return sum(self._modules[name][0](x) + getattr(self, name)[0](x) for name in ("row",))

    def by_another_self(self: Any, x: Any) -> Any:
        me = self
        return me.row[0](x)

    def of_a_list_of_one(self: Any, x: Any) -> Any:
        (block,) = [self.block]
        return block.conv(x)

    def asked_what_it_is(self: Any, x: Any) -> Any:
        return x * (2 if isinstance(self.row[1], nn.BatchNorm2d) else 1)

    def asked_for_a_bias(self: Any, x: Any) -> Any:
        return x * (2 if self.rows[0][0].bias is None else 1)

    def asked_for_eps(self: Any, x: Any) -> Any:
        return x * self.row[1].eps


USES = functions_in(Uses)


@pytest.mark.parametrize("name", USES)
def test_what_takes_apart_is_seen(name: str) -> None:
    assert_part_stays(drawn(adding(USES[name])))
