"""The typed, versioned artefacts that pass between commands and rooms; nothing here imports torch.

`runfile` what the user writes · `inputs` what a model asks of its data · `profile` what things cost
· `plan` who runs what · `stage_graph` who is before and after whom · `index` the sizes of every
sample · `work` the amounts that costs depend on · `trace` the columns of a trace · `files` reading,
writing and fingerprints · `rundir` where artefacts lie.
"""
