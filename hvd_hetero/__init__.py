"""hvd_hetero: training on mixed hardware with Horovod, at the speed of all of it together.

Scripts import `hvd_hetero.torch` or `hvd_hetero.keras`. Importing this package itself imports no framework.
"""

__version__ = "0.1.0"
