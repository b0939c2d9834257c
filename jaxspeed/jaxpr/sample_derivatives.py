"""What derivatives of a model's own have to be, for `sample_independence`.

A derivative by a rule for tangents (`custom_jvp`) is linear in them. If no tangent of a sample's
value depends on another sample, neither does a gradient in its transpose. One by a rule for
gradients (`custom_vjp`) has to be linear in these besides: the gradient of a part's mean is another
multiple of that of the part's sum than the gradient of the entire batch's mean.
"""

from typing import Any

from jaxspeed.jaxpr.sample_values import FREE, MIXED, SAMPLES, SUM, SampleValue, free, mixed
from jaxspeed.jaxpr.traverse import shape_of

# The degree of the gradient that arrives: the unknown factor is a power of n that nothing else has.
ARRIVING = 1 << 16


def gradient_of(x: SampleValue, v: Any, twin: Any) -> SampleValue:
    """The gradient for a value of which a loss is computed that is a sum over samples."""
    degree, shape = ARRIVING - x.degree, shape_of(v)
    if x.kind is SUM:
        return SampleValue(FREE, None, degree, free(len(shape)).varies)
    grown = [d for d, n in enumerate(shape_of(twin)) if n != shape[d]]
    if x.kind is FREE and not grown:
        return SampleValue(SUM, None, degree)
    # One value for all samples is repeated: each has a gradient for it.
    dim = x.dim if x.kind is SAMPLES else grown[0]
    if dim in x.varies | x.drawn:
        return mixed("it is no sum over samples")
    return SampleValue(SAMPLES, dim, degree)


def unlike(new: SampleValue, wanted: SampleValue) -> str | None:
    """Why what a derivative computes is not by sample as it has to be."""
    if new.zero:
        return None
    for x in (new, wanted):
        if x.kind is MIXED:
            return x.why
    if new.degree != wanted.degree:
        return "it computes with the number of samples, or is no multiple of what arrives"
    if wanted.kind is SAMPLES and new.kind is FREE:
        is_like = wanted.dim not in new.varies
    elif wanted.kind is SAMPLES:
        is_like = new.kind is wanted.kind and new.dim == wanted.dim
    else:
        is_like = new.kind is wanted.kind and new.varies <= wanted.varies | wanted.drawn
    return None if is_like else "it mixes samples"
