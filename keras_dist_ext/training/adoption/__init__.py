"""Take a Keras model over as one of ours under a strategy: ``kde.adopt``, ``kde.clone_model``, ``kde.load_model``.

In reading order:

    adopt        the three
    take_over    make a model again in a scope, with all of its state
    rebuild      make it again, layer by layer
    recipe       make a layer, metric or optimizer again from its config
    stand_in     the class of ours for a class of Keras' or of the user's
    twins        copy values from old layers to new ones
    compilation  compile the new model as the old one
"""

__all__: list[str] = []
