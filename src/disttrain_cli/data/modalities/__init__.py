"""Modalities: how the items of each become arrays.

A modality is a file here, a class of heads in `spec.heads`, and its layers in `models`.
"""
