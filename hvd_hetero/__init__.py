"""hvd_hetero: training on mixed hardware with Horovod, at the speed of all of it together.

The faces are `hvd_hetero.torch` and `hvd_hetero.keras`. Importing this package brings in no framework.
"""

__version__ = "0.1.0"
