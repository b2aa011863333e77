"""Families of published vision-language models: contents of a whole folder, module by module.

A family is a file here and one entry of `table.FAMILIES`; `folder` reads a folder through it. Only
JSON is read, so that data nodes, which have no torch, get the same information as others.
"""
