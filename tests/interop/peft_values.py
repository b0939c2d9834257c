"""Adapters' values for tests: as arrays of an export, and merged by the formula."""

import itertools

import numpy as np

from jaxspeed.interop.mapping import matches
from jaxspeed.interop.peft_layout import dims_of


class ArrayValues:
    """Arrays of an export, each in two blocks."""

    def __init__(self, arrays):
        self.arrays = {path: np.asarray(x) for path, x in arrays.items()}
        self.leaves = {path: (x.shape, x.dtype.name) for path, x in self.arrays.items()}

    def blocks(self, path):
        x = self.arrays[path]
        halves = [(slice(0, n // 2), slice(n // 2, n)) for n in x.shape[:1]]
        rest = [(slice(0, n),) for n in x.shape[1:]]
        for index in itertools.product(*halves, *rest):
            yield index, x[index]


def usual_dims(table, shapes):
    found = {}
    for rule in table.rules:
        for _, paths in matches(rule, shapes):
            found |= {p: d for p in paths if (d := dims_of(rule, shapes[p]))}
    return found


def merged(weight, of, adapter):
    """W + s A B; with DoRA m (W + s A B) / |W + s A B|."""
    dims, out = adapter.dims, np.array(weight, np.float64)
    stack = [range(weight.shape[d]) for d in dims.stack]
    scales, ranks = adapter.per_layer(adapter.scales), adapter.per_layer(adapter.ranks)
    for at in itertools.product(*stack):
        if not ranks[at]:
            continue
        a, b = of["A"][at].astype(np.float64), of["B"][at].astype(np.float64)
        product = np.tensordot(a, b, 1)  # [*inputs, *outputs]
        order = np.argsort([*dims.inputs, *dims.outputs])
        total = out[at] + scales[at] * product.transpose(order)
        if of["magnitude"] is not None:
            own = tuple(d - len(dims.stack) for d in dims.inputs)
            norm = np.sqrt(np.square(total).sum(axis=own, keepdims=True))
            m = np.expand_dims(of["magnitude"][at].astype(np.float64), sorted(own))
            total = m * total / norm
        out[at] = total
    return out.astype(np.float32)
