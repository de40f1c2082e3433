"""`hvd.Compression`: how gradients travel."""

from hvd_hetero.optimizers.compression import Compression

__all__ = ["Compression"]
