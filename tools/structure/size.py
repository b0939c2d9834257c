"""Bytes, files and function lengths of the package."""

import ast
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = 2048  # bytes: a file below this is seldom a concept of its own


def size_of(folder: Path = ROOT / "jaxspeed") -> dict[str, Any]:
    """Measure the Python files under a folder; a function's length is in lines from `def` on."""
    files = sorted(folder.rglob("*.py"))
    texts = [file.read_bytes() for file in files]
    lengths = [
        node.end_lineno - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    names = Counter(file.name for file in files if file.name != "__init__.py")
    return {
        "bytes": sum(map(len, texts)),
        "files": len(files),
        "files_below_2_kB": sum(len(text) < SMALL for text in texts),
        "functions": len(lengths),
        "function_lines_mean": round(statistics.mean(lengths), 2),
        "function_lines_median": statistics.median(lengths),
        "basenames_twice": sorted(name for name, count in names.items() if count == 2),
        "basenames_three_times": sorted(name for name, count in names.items() if count > 2),
    }
