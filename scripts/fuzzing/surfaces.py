"""Everything in the node that reads bytes of strangers, each with inputs made for it and what must hold.

Whoever adds a wire message, a stream, a call or a file adds its surface here (tests/hostile/README.md says how the
list is kept complete).
"""

from typing import Final

from . import envelopes, lists, network, sealed, texts
from .run import Surface

SURFACES: Final[dict[str, Surface]] = {
    surface.name: surface for module in (envelopes, network, sealed, lists, texts) for surface in module.SURFACES
}
"""All surfaces by name."""
