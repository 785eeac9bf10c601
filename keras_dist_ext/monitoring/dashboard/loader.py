"""Load the Replicas plugin when TensorBoard asks for it, and never stop TensorBoard.

TensorBoard imports this module at every start, without catching what goes wrong: it imports nothing but TensorBoard's
own base classes, and leaves the rest to `load`.
"""

import logging
from typing import Any

from tensorboard.plugins import base_plugin

__all__ = ["ReplicasLoader"]

_log = logging.getLogger("tensorboard")


class ReplicasLoader(base_plugin.TBLoader):  # type: ignore[misc]  # TensorBoard ships no types
    """Make the plugin, or say why there is none."""

    def load(self, context: Any) -> Any:
        """Return the plugin; None, after one warning, where it cannot work."""
        if context.data_provider is None:
            _log.warning("The Replicas tab is off: TensorBoard runs with --generic_data=false. Start it without.")
            return None
        try:
            from keras_dist_ext.monitoring.dashboard.plugin import ReplicasPlugin

            return ReplicasPlugin(context)
        except Exception as error:  # whatever it is, the other tabs must work
            _log.warning(
                "The Replicas tab is off: %s: %s. Install keras_dist_ext again, with its dependencies; the other tabs "
                "are not affected.",
                type(error).__name__,
                error,
            )
            return None
