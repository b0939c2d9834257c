"""Who enters the inner programs of equations: `jaxpr/`, the planner, and these files, with reasons.

Others have what they need from a `Rewriter`, a `ForwardAnalysis` or `traverse.equations`.
"""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

PACKAGE = Path(__file__).parents[1] / "jaxspeed"
OPENING = {
    *("bodies", "transparent_bodies", "sliceable_bodies", "programs"),
    *("called", "open_jaxpr", "nested_constants"),
}
REASONS = {
    "adapters/adapt_loss.py": "a Rewriter, whose programs get further inputs",
    "engine/diagnose.py": "evaluates programs with flags beside their values",
    "traced_loss/router_choices.py": "a Rewriter, whose programs get further inputs or results",
    "traced_loss/autocast.py": "a Rewriter, which asks for what a loop carries",
    "pipeline/scanned_stack.py": "a stage's program is the body of one scan",
    "remat/unit_jaxprs.py": "units are cut out of programs by the segments of each",
    "sequence_parallel/attention_region.py": "matches a pattern through custom derivatives",
    "sequence_parallel/find_attention.py": "inlines calls, and gives programs further inputs",
    "sequence_parallel/softmax_forms.py": "matches a pattern through custom derivatives",
    "train_state/staged_init.py": "asks for constants within a program",
    "zero3/find_units.py": "counts how often one trace is called, in order",
    "zero3/segmented_eval.py": "evaluates programs with stored parameters",
    "zero3/segments.py": "follows stored parameters to lookups, into plain calls alone",
}


def opens(source: str) -> bool:
    tree = ast.parse(source)
    imports = (x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom))
    names = {x.name for i in imports if i.module == "jaxspeed.jaxpr.traverse" for x in i.names}
    calls = (x.func for x in ast.walk(tree) if isinstance(x, ast.Call))
    return any(isinstance(f, ast.Name) and f.id in names & OPENING for f in calls)


def test_no_other_file_enters_inner_programs():
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    outside = [path for path in files if path.parts[0] not in ("jaxpr", "planner")]
    found = {str(path) for path in outside if opens((PACKAGE / path).read_text())}
    assert found == REASONS.keys(), "use jaxpr/frames.py or rewriter.py, or give the reason here"
