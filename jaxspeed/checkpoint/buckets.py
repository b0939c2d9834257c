"""Access to buckets: arrays and locks by TensorStore, small files by etils' epath over fsspec.

Both use the endpoint of AWS's configuration (`AWS_ENDPOINT_URL`), and its credentials: those of the
environment, or else of AWS's default chain.
"""

import os
import re
from typing import Any

from etils import epath
from etils.epath.backend import fsspec_backend

from jaxspeed.config.before_start import packages_of_url, refuse_missing
from jaxspeed.errors import CheckpointError

# A server that does not answer fails a save after about half a minute; the run goes on.
_RETRIES = {"max_retries": 7, "initial_delay": "250ms", "max_delay": "8s"}


def is_local(path: Any) -> bool:
    return "://" not in str(path)


def open_bucket(folder: epath.Path) -> None:
    """Prepare reading of a bucket: what a listing returns is never out of date.

    fsspec stores listings, which other processes and TensorStore change.

    Raises:
      ConfigError: the package that reads such URLs is not installed.
    """
    if is_local(folder):
        return
    url = str(folder)
    if not (packages := [*packages_of_url(url, url)]):
        raise CheckpointError(f"{url}: neither a folder nor a gs:// or s3:// URL")
    refuse_missing(packages)
    files = fsspec_backend.fs(folder)
    files.dircache.use_listings_cache = False
    files.invalidate_cache()


def first_line(error: Exception) -> str:
    """Without what TensorStore adds: the spec, and the server's answer, which may name a key."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.split(r" \[\w+='", lines[0])[0]


def sizes_in_bucket(folder: epath.Path) -> dict[str, int]:
    """Bytes of all files below a folder, by relative path, from one listing."""
    files = fsspec_backend.fs(folder)
    start = len(files._strip_protocol(str(folder))) + 1
    return {path[start:]: x["size"] for path, x in files.find(str(folder), detail=True).items()}


def key_values(folder: epath.Path) -> Any:
    """TensorStore's store of the files in a folder; it has conditional writes."""
    import tensorstore as ts

    return ts.KvStore.open(key_values_spec(folder), context=new_context()).result()


def key_values_spec(folder: epath.Path) -> dict[str, Any]:
    """TensorStore's description of the files in a folder."""
    scheme, _, path = str(folder).rpartition("://")
    if not scheme:
        return {"driver": "file", "path": f"{path}/"}
    bucket, _, path = path.partition("/")
    spec: dict[str, Any] = {"bucket": bucket, "path": f"{path}/" if path else ""}
    if scheme == "gs":
        return {"driver": "gcs", **spec}
    spec |= {"driver": "s3", "use_conditional_write": True}
    client = fsspec_backend.fs(folder).s3.meta
    if not client.endpoint_url.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        spec |= {"endpoint": client.endpoint_url, "aws_region": client.region_name}
    return spec


def new_context() -> Any:
    """Resources of TensorStore: retries, credentials, and what it has read, which may change."""
    import tensorstore as ts

    # AWS's chain reports on stderr each file of credentials that does not exist.
    source = "environment" if "AWS_ACCESS_KEY_ID" in os.environ else "default"
    return ts.Context(
        {
            "aws_credentials": {"type": source},
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
            "cache_pool": {"total_bytes_limit": 100 << 20},  # the indices of databases
        }
    )
