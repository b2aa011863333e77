"""Typed, versioned artefacts that pass between commands and subpackages; no imports of torch.

`runfile` the user's configuration · `inputs` a model's data requirements · `profile` costs · `plan`
placement of modules on ranks · `stage_graph` order of stages · `index` sizes of every sample ·
`work` the amounts that costs depend on · `trace` the columns of a trace · `files` reading, writing
and fingerprints · `rundir` locations of artefacts.
"""
