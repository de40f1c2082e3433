"""Codecs turn a gradient into what travels, and back. They never communicate."""
