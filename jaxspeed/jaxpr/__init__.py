"""Traced programs: traversal, slicing, inlining, evaluation, FLOPs, dim relations, module scopes.

`traverse` lists the programs that an equation runs, `rewriter` rewrites them, `weight_uses` says
which equation reads which weight, `slicing` takes parts,
`evaluate` runs them, `flops` counts them; `primitives` has the operations by class,
`dim_relations` relates the dims of their operands and results, and `module_scopes` tags equations
with module calls.
"""
