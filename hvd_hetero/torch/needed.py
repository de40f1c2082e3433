"""Checks the versions of torch and Horovod on import, before any other module of `hvd_hetero.torch` is imported."""

from hvd_hetero.engine.version import check_lowest, horovod_for

check_lowest("torch")
horovod_for("torch")
