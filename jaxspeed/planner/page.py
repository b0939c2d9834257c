"""The HTML page of a plan: one self-contained file, a template with the figures in it."""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def page_of(figures: Mapping[str, Any]) -> str:
    """The page of a plan's figures, which a script in page.html draws.

    Nothing is loaded, and the content security policy allows only that script, by its hash: names
    of models and files come from users.
    """
    page = files(__package__).joinpath("page.html").read_text("utf-8")
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = json.dumps(figures, default=str)
    for sign in "<>&\u2028\u2029":  # so that no text closes the element that it is in
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # The figures last: text in them may be that of a placeholder.
    return page.replace("SCRIPT-HASH", f"sha256-{digest}").replace("FIGURES", text, 1)
