"""Tools for programs as JAX traces them: evaluation, inlining, module scopes, dims, FLOPs."""
