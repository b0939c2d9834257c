"""Access to buckets: arrays and locks by TensorStore, small files by etils' epath over fsspec.

Both have the endpoint of AWS's configuration, and credentials of the environment or AWS's chain.
"""

import os
import re
from typing import Any

from etils import epath
from etils.epath.backend import fsspec_backend

from jaxspeed.config.before_start import packages_of_url, refuse_missing

# For about half a minute; then a save has failed.
_RETRIES = {"max_retries": 7, "initial_delay": "250ms", "max_delay": "8s"}


def is_local(path: Any) -> bool:
    return "://" not in str(path)


def open_bucket(folder: epath.Path) -> None:
    """Check that the package for a bucket is there; it stores no listings, which others change."""
    if not is_local(folder):
        refuse_missing(packages_of_url("checkpoints", str(folder)))
        files = fsspec_backend.fs(folder)
        files.dircache.use_listings_cache = False
        files.invalidate_cache()


def first_line(error: Exception) -> str:
    """Without what TensorStore adds, such as the server's answer, which may name a key."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.split(r" \[\w+='", lines[0])[0]


def sizes_in_bucket(folder: epath.Path) -> dict[str, int]:
    """Bytes of all files below a folder, by relative path, from one listing."""
    files = fsspec_backend.fs(folder).find(str(folder), detail=True)
    start = len(str(folder).partition("://")[2]) + 1
    return {path[start:]: file["size"] for path, file in files.items()}


def key_values_spec(folder: epath.Path) -> dict[str, Any]:
    """TensorStore's description of the files in a folder."""
    if is_local(folder):
        return {"driver": "file", "path": f"{folder}/"}
    scheme, _, place = str(folder).partition("://")
    bucket, _, path = f"{place}/".partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path}
    spec = {"driver": "s3", "bucket": bucket, "path": path, "use_conditional_write": True}
    client = fsspec_backend.fs(folder).s3.meta
    if not re.match(r"https://s3[\w.-]*\.amazonaws\.com", client.endpoint_url):
        spec |= {"endpoint": client.endpoint_url, "aws_region": client.region_name}
    return spec


def new_context() -> Any:
    """Retries, credentials, and a cache of databases' indices, which another save changes."""
    import tensorstore as ts

    # The chain reports on stderr each file that does not exist, and has no profile by default.
    source = {"type": "default", "profile": os.environ.get("AWS_PROFILE", "default")}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        source = {"type": "environment"}
    retries = {f"{kind}_request_retries": _RETRIES for kind in ("s3", "gcs")}
    cache = {"total_bytes_limit": 1 << 26}
    return ts.Context({**retries, "aws_credentials": source, "cache_pool": cache})
