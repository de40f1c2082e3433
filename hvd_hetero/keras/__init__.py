"""`import hvd_hetero.keras as hvd`: Horovod for Keras 3, and training on mixed hardware."""

from .balancer import Balancer

__all__ = ["Balancer"]
