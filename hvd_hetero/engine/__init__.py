"""The port to Horovod: what the algorithms may ask for, and who answers (Horovod, threads, or nobody else)."""
