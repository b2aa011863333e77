"""Modalities: how the items of each become arrays.

A modality is a file here, a specification class (`Head`) in `spec.heads`, and its layers in
`models`.
"""
