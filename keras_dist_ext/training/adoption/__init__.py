"""Take a Keras model over as one of ours under a strategy: ``kde.adopt``, ``kde.clone_model``, ``kde.load_model``.

In reading order:

    adopt              the three
    take_over          rebuild a model in a scope, with all of its state
    rebuild            rebuild it, layer by layer
    recipe             rebuild a layer, metric or optimizer from its config
    distributed_class  the class of this package for a class of Keras' or of the user's
    variable_pairs     copy values from old layers to new ones
    compilation        compile the new model as the old one
"""

__all__: list[str] = []
