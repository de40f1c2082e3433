"""What has to be there before anything else of this package is imported."""

from hvd_hetero.engine.version import check_lowest, horovod_for

check_lowest("torch")
horovod_for("torch")
