"""A thread that uses processor time."""

import time


def spin(seconds: float) -> None:
    """Runs until the calling thread has had so many `seconds` of processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
