"""Figures of compiled programs that a refactoring must not change, and the package's size.

    python -m tools.structure record            # write record.json beside this file
    python -m tools.structure compare           # measure again; exit 1 if anything differs
    python -m tools.structure mutations         # apply each mutation: its test must fail
    python -m tools.structure mutations --check # can each text and test be found? none is run

`record` and `compare` take `--only` with any of `cpu tpu size flow` (`--only cpu size`).

This is not in `benchmarks/`: nothing here is timed, and `make bench` runs every file there. It uses
the public interface of jaxspeed alone (`initialize`, `Engine.compiled`, `plan`), so that moving and
renaming modules needs no change here.

- `cases.py`: the configs and models whose programs are compiled
- `programs.py`: flops, collectives and memory of the compiled programs
- `size.py`: bytes, files and function lengths of the package
- `flow.py`: the files that a parameter, a batch and the ZeRO stage pass through
- `mutations.py`, `mutation_list.py`: source mutations that tests catch, and how they are run

A mutation whose text a later change rewrites is to be written anew against the new text, so that
as many are left as there were.
"""
