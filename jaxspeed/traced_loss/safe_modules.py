"""Modules that `torch_autocast.lower_precision_safe_modules` names, by class or path pattern."""

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.config import match
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.module_scopes import Call, calls_in
from jaxspeed.jaxpr.traverse import equations
from jaxspeed.placement.paths import listed

log = logging.getLogger("jaxspeed")
KEY = "torch_autocast.lower_precision_safe_modules"
# Flax's classes for those of torch.
_FLAX = {
    "Linear": ("Linear", "LinearGeneral", "Einsum", "Dense", "DenseGeneral"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), ("Conv",)),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"), ("ConvTranspose",)),
    "Embedding": ("Embed",),
}


@dataclass(frozen=True)
class SafeModules:
    """`__call__(call)`: whether a call is of one of these modules; None: of any."""

    names: tuple[str, ...] | None = None

    def __call__(self, call: Call) -> bool:
        return self.names is None or any(_is_of(call, name) for name in self.names)

    def check(self, jaxpr: Any, parameters: Sequence[str]) -> None:
        """Report names of no module that a traced loss calls; ConfigError if there are only those.

        A class of torch may be absent: such lists are shared by models.
        """
        stacks = (str(eqn.source_info.name_stack) for eqn in equations(jaxpr.eqns))
        calls = {call for stack in stacks for call in calls_in(stack)}
        idle = [name for name in self.names or () if not any(_is_of(c, name) for c in calls)]
        # The body of a scan has no paths.
        scanned = {name for name in idle if any(match(name, path) for path in parameters)}
        absent = [name for name in idle if name.startswith("torch.")]
        unknown = [name for name in idle if name not in absent and name not in scanned]
        known = sorted({call.kind for call in calls} | {call.path for call in calls} - {""})
        notes = [
            f"{KEY}: {name!r} is no class or path of a module that the loss calls; nearest: "
            + listed(difflib.get_close_matches(name, known, cutoff=0.4) or known)
            for name in unknown
        ]
        if unknown and len(unknown) == len(self.names or ()):
            raise ConfigError("; ".join(notes))
        if idle and len(idle) == len(self.names or ()):
            notes.append(
                f"{KEY}: the loss calls no module of {listed(idle)}: under stage 3 all weights are "
                "gathered, and their gradients reduced, in fp32"
            )
        for note in notes:
            log.warning("%s", note)


def _is_of(call: Call, module: str) -> bool:
    """Whether a call is of a module: a class, by its name in Flax or torch, or a path pattern."""
    name = module.rpartition(".")[2]
    return call.kind in _FLAX.get(name, (name,)) or match(module, call.path)
