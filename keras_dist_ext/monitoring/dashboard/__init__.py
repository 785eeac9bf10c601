"""TensorBoard's tab *Replicas*, and the names of runs and tags that writers share with it.

Nothing here ever imports TensorFlow or Keras; TensorBoard imports `loader` when it starts, and that imports the rest
when the plugin is needed.

    metadata     the names of runs and tags, and the manifest; writers import it
    loader       the entry point `tensorboard_plugins`
    plugin       the routes
    query        the arguments of a request, checked
    source       the data that TensorBoard has read, cached until it reads more
    reading      reads columns instead of points
    points       one series: sorted, each step once
    experiments  runs that belong together, their manifest, findings and plan
    lines        series reduced to the pixels of a chart, with their extremes
    trained      how fast experiments were, beside a plan
    summary      numbers of each replica for tables and bars
    export       every point as CSV
    view, clock  one experiment during one request, and the times of its steps
    chart        lines for one tag
    wire         numbers as JSON
    static_files, static/   the page: ES modules without a build step, and uPlot
"""

__all__: list[str] = []
