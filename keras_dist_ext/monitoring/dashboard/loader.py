"""Load the Replicas plugin when TensorBoard asks for it, and never stop TensorBoard.

TensorBoard imports this module at every start, without catching errors: it imports only TensorBoard's base classes, and
leaves the rest to `load`.
"""

import logging

from tensorboard.plugins import base_plugin

__all__ = ["ReplicasLoader"]

_log = logging.getLogger("tensorboard")


class ReplicasLoader(base_plugin.TBLoader):  # type: ignore[misc]  # TensorBoard ships no types
    """Create the plugin, or log why it is off."""

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin | None:
        """Return the plugin; None, after one warning, where it cannot work."""
        if context.data_provider is None:
            _log.warning(
                "The Replicas tab is off: TensorBoard runs with --generic_data=false. Start it without that option."
            )
            return None
        try:
            from keras_dist_ext.monitoring.dashboard.plugin import ReplicasPlugin

            return ReplicasPlugin(context)
        except Exception as error:  # the other tabs must work in any case
            _log.warning(
                "The Replicas tab is off: %s: %s. Reinstall keras_dist_ext with its dependencies; the other tabs "
                "are not affected.",
                type(error).__name__,
                error,
            )
            return None
