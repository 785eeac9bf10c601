"""Show every replica in TensorBoard: the tab *Replicas*, and the names that writers share with it.

Nothing here imports TensorFlow or Keras, now or later; TensorBoard imports `loader` when it starts, and that imports
the rest when it is asked for the plugin.

    metadata     what runs and tags are called, and what the manifest holds; writers import it
    loader       what the entry point `tensorboard_plugins` names
    plugin       the routes
    query        what a request asks for, checked
    source       what TensorBoard has read, kept until it reads more
    reading      how it is read: columns instead of points
    points       one series: sorted, each step once
    experiments  runs that belong together, their manifest and findings
    lines        series reduced to as many points as a chart has pixels, extremes kept
    summary      numbers of each replica for tables and bars
    export       every point as CSV
    view, clock  one experiment during one request, and when its steps were
    chart        lines for one tag
    wire         numbers as JSON
    static_files, static/   the page: ES modules without a build step, and uPlot
"""

__all__: list[str] = []
