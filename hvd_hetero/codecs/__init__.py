"""Codecs: they encode a gradient into the array that is sent, and decode it. They never communicate."""
