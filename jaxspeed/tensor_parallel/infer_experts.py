"""Inferred dims of experts: the stacked weights of a model that names no dims.

Rows that were dispatched to experts are multiplied with weights of their own, and what comes out is
summed over the experts. So in a traced program the dim of the experts is one that

    einsum("ebcm,emf->ebcf", rows, up)      a weight shares with the rows of its product, and
    einsum("ebcm,bsec->bsm", out, weights)  two activations contract, or a reduction sums.

Heads with weights of their own are of the first kind alone: a weight contracts them.
"""

from jaxspeed.tensor_parallel.array_roles import ArrayRoles
from jaxspeed.tensor_parallel.dim_propagation import PropagatedDims
from jaxspeed.tensor_parallel.matmuls import matmuls_of


def infer_experts(propagated: PropagatedDims) -> dict[str, int]:
    """{path: dim} of the parameters that stack experts; not of routers, whose last dim they are."""
    classes, matmuls = propagated.classes, matmuls_of(propagated, ArrayRoles(propagated))
    shared = {
        cls
        for matmul in matmuls
        for i in matmul.weights
        if matmul.kind == "dot" and not matmul.operands[1 - i].parameters
        for cls in matmul.classes("shared", i)
        if not propagated.is_sample(cls)
    }
    summed = {
        cls
        for matmul in matmuls
        if matmul.kind == "dot" and not list(matmul.weights)
        for cls in matmul.classes("contracted", 0)
    }
    for frame in propagated.top.walk():
        for position, ended in frame.ended.items():
            eqn = frame.jaxpr.eqns[position]
            if eqn.primitive.name == "reduce_sum":
                nodes = (frame.of(eqn.invars[i])[dim] for i, dim in ended)
                summed |= {classes.of(node) for node in nodes if node is not None}
    experts = shared & summed
    return {
        path: dim
        for path, nodes in propagated.parameters.items()
        for dim, node in enumerate(nodes[:-1])
        if node is not None and classes.of(node) in experts
    }
