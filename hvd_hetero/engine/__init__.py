"""The port to Horovod: the interface of collectives for the algorithms, and its engines (Horovod, threads, solo)."""
