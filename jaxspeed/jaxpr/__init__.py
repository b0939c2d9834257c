"""Tools for programs as JAX traces them.

`traverse` says what programs an equation runs, `slicing` and `inline_calls` cut and rewrite them,
`evaluate` runs them, `flops` counts them; `primitives` are the operations by class, and
`module_scopes` name the module calls that they come from.
"""
