"""Runs of DeepSpeed and of torch, continued with their optimizer; no code of theirs is run."""

from jaxspeed.interop.torch_runs.imported import import_run, read_torch_run, table_in
from jaxspeed.interop.torch_runs.torch_run import TorchRun

__all__ = ["TorchRun", "import_run", "read_torch_run", "table_in"]
